"""A whole Flower fleet on this machine: the commands that `sfvi flower` prints, real processes, real TLS."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil

from .federation import HERE, SFVI, environment, free_port, use_all_cores


class Fleet:
    """SuperLink, SuperExec and SuperNodes; whoever is killed can be started again by the same command."""

    def __init__(
        self,
        folder,
        silos=("north", "south"),
        *,
        model="cities:model",
        data="cities:load",
        app_dir=HERE,
        precision="float32",
    ):
        use_all_cores()
        self.folder, self.silos = Path(folder), tuple(silos)
        self.kits, self.port, self.processes = self.folder / "kits", free_port(), {}
        self.common = ["--app-dir", str(app_dir), "--model", model, "--precision", precision]
        flags = [part for name in self.silos for part in ("--silo", name)]
        self.sfvi("init", str(self.kits), "--port", str(self.port), *flags)
        printed = self.printed("server", "--folder", str(self.kits / "server"), *self.common)
        self.commands = {words[0]: words for words in printed if words[0].startswith("flower-")}
        self.registrations = [words for words in printed if words[:2] == ["flwr", "supernode"]]
        self.run_command = next(words for words in printed if words[:2] == ["flwr", "run"])
        for name in self.silos:
            self.commands[name] = self.silo_command(self.kits / name, data)
        self.home = {"flower-superlink": self.kits / "server", "flower-superexec": self.kits / "server"}
        self.home |= {name: self.kits / name for name in self.silos}
        self.started = {}

    def silo_command(self, kit, data="cities:load"):
        port = ["--port", str(free_port())]
        return self.printed("silo", "--folder", str(kit), "--data", data, *port, *self.common)[-1]

    def __enter__(self):
        self.start("flower-superlink")
        self.wait_for_superlink()
        self.start("flower-superexec")
        for words in self.registrations:
            self.flwr(*words[1:])
        for name in self.silos:
            self.start(name)
        return self

    def __exit__(self, *_):
        for name in list(self.processes):
            self.kill(name)

    def sfvi(self, *arguments):
        done = subprocess.run(
            [*SFVI, "flower", *arguments], capture_output=True, text=True, env=environment(), cwd=self.folder
        )
        assert not done.returncode, f"{arguments}: {done.stdout}\n{done.stderr}"
        return done.stdout

    def printed(self, *arguments):
        """The Flower commands that sfvi prints."""
        lines = self.sfvi(*arguments).splitlines()
        return [shlex.split(line) for line in lines if line.startswith(("flower-", "flwr "))]

    def environment(self, kit):
        lines = (kit / "flower.env").read_text().splitlines()
        found = dict(shlex.split(line)[0].split("=", 1) for line in lines)
        return {**surroundings(), **found, "NO_COLOR": "1"}

    def start(self, name, command=None, kit=None):
        command, self.home[name] = command or self.commands[name], kit or self.home[name]
        with open(self.folder / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                [str(Path(sys.executable).parent / command[0]), *command[1:]],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self.environment(self.home[name]),
                cwd=self.folder,
                start_new_session=True,
            )
        self.started[name] = time.monotonic()
        return self.processes[name]

    def supervise(self):
        """Start again what ended, 10 s after it was started last."""
        for name in ("flower-superlink", "flower-superexec", *self.silos):
            ended = name not in self.processes or self.processes[name].poll() is not None
            if ended and time.monotonic() - self.started[name] > 10:
                self.start(name)

    def flwr(self, *arguments, check=True):
        """A command of `flwr` to its end, and what it says."""
        done = subprocess.run(
            [str(Path(sys.executable).parent / "flwr"), *arguments, "--format", "json"],
            capture_output=True,
            text=True,
            env=self.environment(self.kits / "server"),
            cwd=self.folder,
        )
        said = json.loads(done.stdout) if done.stdout.startswith("{") else {}
        assert said.get("success") or not check, f"{arguments}: {done.stdout}\n{done.stderr}\n{self.logs()}"
        return said

    def wait_for_superlink(self, timeout=60):
        begin = time.monotonic()
        while not self.flwr("ls", "sfvi", check=False).get("success"):
            assert time.monotonic() - begin < timeout, f"no SuperLink\n{self.logs()}"
            time.sleep(0.2)

    def begin(self, name, **chosen):
        """Start a run; returns Flower's number of it."""
        path = self.folder / f"{name}.toml"
        path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in {"name": name, **chosen}.items()))
        app = self.run_command[2]
        return self.flwr("run", app, "sfvi", "--run-config", str(path))["run-id"]

    def state(self, number):
        """Flower's status of a run, and its details."""
        found = self.flwr("ls", "sfvi", "--run-id", str(number))["runs"][0]
        return found["status"], found["status-details"]

    def wait(self, number, run=None, timeout=300):
        """Until a run is over; returns its state. Asking Flower costs seconds: a status file is looked at first."""
        begin = time.monotonic()
        while run is not None and self.status(run).get("state") not in ("finished", "stopped"):
            assert time.monotonic() - begin < timeout, f"{run} takes too long\n{self.logs()}"
            time.sleep(0.3)
        while not (state := self.state(number))[0].startswith("finished"):
            assert time.monotonic() - begin < timeout, f"{number} does not end\n{self.logs()}"
            time.sleep(0.5)
        return state

    def run(self, name, **chosen):
        return self.wait(self.begin(name, **chosen), name)

    def status(self, run):
        path = self.kits / "server" / "runs" / run / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def result(self, run):
        return self.kits / "server" / "runs" / run / "result"

    def silo_posterior(self, silo, run):
        return self.kits / silo / "runs" / run / "posterior.npz"

    def children(self, name, what=""):
        """Living processes below one that was started, or that it left behind; `what` is part of their command."""
        home, found = str(self.home[name] / "flower"), []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                mine = process.environ().get("FLWR_HOME") == home and process.status() != psutil.STATUS_ZOMBIE
                if mine and what in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def kill(self, name, what=None):
        """SIGKILL one that was started, with all below; or only those whose command contains `what`."""
        if what is not None:
            killed = self.children(name, what)
            for process in killed:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            return len(killed)
        process = self.processes.pop(name)
        below = []
        with contextlib.suppress(psutil.NoSuchProcess):
            below = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        for pid in [process.pid, *below]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        return 1

    def logs(self):
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))


def surroundings():
    """Of all processes; in tests they compile as quickly as the tests themselves."""
    return {**environment(), **{name: os.environ[name] for name in ("XLA_FLAGS",) if name in os.environ}}


def assert_close(one, other, tolerance):
    """Relative to the largest entry of each array."""
    assert set(one) == set(other)
    for name, array in one.items():
        scale = np.abs(array).max(initial=0.0)
        np.testing.assert_allclose(array, other[name], rtol=0, atol=tolerance * scale, err_msg=name)
