"""A whole federation on this machine: the real commands, real processes, real TLS."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

HERE = Path(__file__).parent
SFVI = [sys.executable, "-m", "sfvi"]
ENVIRONMENT = {
    "JAX_ENABLE_X64",
    "JAX_COMPILATION_CACHE_DIR",
    "PYTEST_XDIST_WORKER",
    "PYTEST_CURRENT_TEST",
}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def use_all_cores():
    """A worker of the tests has one core; the processes of a federation share all."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


class Federation:
    """Server and silos as an operator starts them; whoever is killed can be started again by the same command."""

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
        self.kits = self.folder / "kits"
        self.processes = {}
        self.port = free_port()
        common = ["--app-dir", str(app_dir), "--model", model, "--precision", precision]
        self.folder.mkdir(parents=True, exist_ok=True)
        policy = self.folder / "policy.toml"
        policy.write_text('disclose = ["num_units", "theta", "elbo"]\n')
        rules = ["--policy", str(policy)]
        self._commands = {
            "server": [*SFVI, "server", "start", "--kit", str(self.kits / "server"), *common],
            **{
                name: [*SFVI, "silo", "start", "--kit", str(self.kits / name), "--data", data, *rules, *common]
                for name in self.silos
            },
        }
        flags = [part for name in self.silos for part in ("--silo", name)]
        self.sfvi("deploy", "init", str(self.kits), "--port", str(self.port), *flags)

    def __enter__(self):
        self.start("server")
        self.wait_for_server()
        for name in self.silos:
            self.start(name)
        return self

    def __exit__(self, *_):
        for name in list(self.processes):
            self.kill(name)

    def sfvi(self, *arguments, check=True, timeout=600):
        """Run a command to its end."""
        done = subprocess.run(
            [*SFVI, *arguments], capture_output=True, text=True, timeout=timeout, env=environment(), cwd=self.folder
        )
        if check and done.returncode:
            raise AssertionError(f"{arguments}: {done.stdout}\n{done.stderr}\n{self.logs()}")
        return done

    def start(self, name, *extra):
        self.processes[name] = self._spawn([*self._commands[name], *extra], name)

    def wait_for_server(self, timeout=60):
        begin = time.monotonic()
        while time.monotonic() - begin < timeout:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                time.sleep(0.2)
        raise AssertionError(f"the server does not listen\n{self.logs()}")

    def job_process(self, name):
        """The process that does the work: NVFlare's server or client job."""
        try:
            children = psutil.Process(self.processes[name].pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return None
        return next((c for c in children if c.status() != psutil.STATUS_ZOMBIE), None)

    def kill(self, name, *, job=False):
        """SIGKILL a site, or only its job process."""
        if job:
            process = self.job_process(name)
            if process is not None:
                process.kill()
            return process is not None
        process = self.processes.pop(name)
        children = []
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(process.pid).children(recursive=True)
        for each in [process, *children]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGKILL)
        process.wait()
        return True

    def kill_only_parent(self, name):
        """SIGKILL a site's own process and let its job process find out."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def status(self, run):
        path = self.kits / "server" / "runs" / run / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def run_command(self, name, *arguments):
        return [
            *SFVI,
            "run",
            "--kit",
            str(self.kits / "operator"),
            "--name",
            name,
            "--output",
            str(self.folder / name),
            *arguments,
        ]

    def run(self, name, *arguments, **options):
        return self.sfvi(*self.run_command(name, *arguments)[len(SFVI) :], **options)

    def begin(self, name, *arguments):
        """Start a run in the background."""
        return self._spawn(self.run_command(name, *arguments), f"run-{name}")

    def _spawn(self, command, name):
        with open(self.folder / f"{name}.log", "ab") as log:
            return subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment(),
                cwd=self.folder,
            )

    def silo_posterior(self, silo, run):
        return self.kits / silo / "runs" / run / "posterior.npz"

    def logs(self):
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))


def environment():
    kept = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    return {**kept, "JAX_PLATFORMS": "cpu"}
