"""The operator of a run: submits it, watches it, and submits it again until it is done."""

import base64
import contextlib
import json
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

from ... import archive
from ...errors import DeploymentError, OptionError
from ..spec import RunSpec
from . import kits
from .kits import OPERATOR
from .roles import OUTCOME, STATUS_TOPIC

log = logging.getLogger("sfvi")
POLL = 2.0
PATIENCE = 5.0  # seconds for one attempt to reach the server
CONNECTING = 30.0  # seconds that silos have to connect before the first job, if not all are needed
ROLES = "sfvi.deploy.nvflare.roles"
RUNTIME = "nvflare.collab.runtime"
JOB = "sfvi-"  # before the name of a run
ENDED = "ended"  # state of a run none of whose jobs is under way


class Operator:
    """Speaks to the server with the operator's kit.

    Args:
        kit: The operator's kit.
        spec: The run.
        tell: Called with the run's status about once a second.
    """

    def __init__(self, kit: Path, spec: RunSpec, tell: Callable[[dict[str, Any]], None] = lambda status: None):
        kits.check(Path(kit), role="admin")
        self._kit, self._spec, self._tell = Path(kit), spec, tell
        self._session: Session | None = None
        self._begun = False

    def run(self, output: Path) -> Path:
        """Bring the run to its end; returns the folder with its result, which may hold this run's already."""
        check_output(output, self._spec.name)
        archive.probe(output / "global.npz")
        try:
            return self._run(output)
        finally:
            self.close()

    def _run(self, output):
        progress, since = None, time.monotonic()
        while True:
            job, silos = self._running() or self._submit()
            word = self._watch(job, silos)
            if word["state"] == "finished":
                return self._fetch(job, output)
            if word["state"] == "failed":
                raise DeploymentError(word["reason"])
            log.warning("the job ended before the run (%s); it is submitted again", word["reason"])
            if word["state"] == "waiting":  # for how long is settled there
                continue
            if word.get("step") != progress:
                progress, since = word.get("step"), time.monotonic()
            elif time.monotonic() - since > self._spec.deadline:
                raise DeploymentError(
                    f"The run {self._spec.name!r} made no progress for {self._spec.deadline:g} seconds "
                    f"({word['reason']}); nothing is lost: look at the logs of server and silos, then start it again."
                )

    def _submit(self):
        """Wait for the silos, then hand the job over."""
        silos = self._wait_for_silos()
        with tempfile.TemporaryDirectory() as folder:
            _write_job(Path(folder) / "job", self._spec, silos)
            job = self._ask(lambda session: session.submit_job(str(Path(folder) / "job")))
        log.info(
            "run %s is submitted to %s; their processes start and compile (job %s)",
            self._spec.name,
            ", ".join(silos),
            job,
        )
        return job, silos

    def _wait_for_silos(self):
        begin = said = time.monotonic()
        needed = self._spec.min_silos or len(self._spec.silos)
        while True:
            there = self._connected()
            missing = sorted(set(self._spec.silos) - set(there))
            if not missing:
                return sorted(self._spec.silos)
            waited = time.monotonic() - begin
            enough = len(self._spec.silos) - len(missing) >= needed
            if enough and waited > self._spec.late + (0.0 if self._begun else CONNECTING):
                return sorted(set(self._spec.silos) - set(missing))  # whether that will do the server says
            if waited > self._spec.deadline:
                raise DeploymentError(
                    f"{', '.join(map(repr, missing))} did not connect within {self._spec.deadline:g} seconds; start "
                    "them (`sfvi silo start`), then the run again: it goes on where it was."
                )
            if time.monotonic() - said > 5.0 or said == begin:
                said = time.monotonic()
                log.info("waiting for %s to connect", ", ".join(missing))
                self._tell({"run": self._spec.name, "state": "waiting", "waiting for": missing})
            time.sleep(POLL)

    def _watch(self, job, silos):
        """Until the job is over; what came of it."""
        started = self._server_started()
        last: dict[str, Any] = {}
        missed: dict[str, Any] = {}
        while True:
            time.sleep(POLL)
            state = str(self._ask(lambda session: session.get_job_status(job)))
            if state.startswith("FINISHED"):
                break
            if self._server_started() != started:
                return {"state": "interrupted", "reason": "the server was restarted", "step": last.get("round")}
            found = self._status(job)
            if found:
                last = found
                self._begun = self._begun or "round" in found
                self._tell(found)
            elif not last and (gone := sorted(set(silos) - set(self._connected()))):
                self._abort(job)
                return {"state": "waiting", "reason": f"{', '.join(gone)} is gone", "step": None}
            if last.get("state") != "finished" and (back := self._back(silos, last, missed)):
                log.info("%s is back; the job is begun anew with it", ", ".join(back))
                self._abort(job)
                return {"state": "interrupted", "reason": "a silo came back", "step": last.get("round")}
        word = self._outcome(job) or {"state": "interrupted", "reason": state}
        return {**word, "step": last.get("round")}

    def _back(self, silos, last, missed):
        """Silos that the run does without and that were heard of since they were missed first.

        A killed one stays in NVFlare's list for a while, but is not heard of.
        """
        away = set(self._spec.silos) - set(silos) | set(last.get("lost", [])) if self._begun else set()
        if not away:
            return []
        heard = self._connected()
        for name in away:
            missed.setdefault(name, heard.get(name))
        return sorted(name for name in away & set(heard) if heard[name] != missed[name])

    def _abort(self, job):
        try:
            self._ask(lambda session: session.abort_job(job), once=True)
        except Exception:  # it has just ended, or the connection has: both are found out next
            log.debug("job %s could not be aborted", job)

    def _status(self, job):
        try:
            return self._ask(lambda session: session.do_app_command(job, STATUS_TOPIC, {}), once=True)
        except Exception:  # not yet, or no longer, running
            return None

    def _outcome(self, job):
        with tempfile.TemporaryDirectory() as folder:
            path = self._download(job, folder)
            files = list(path.rglob(OUTCOME)) if path else []
            return json.loads(files[0].read_text()) if files else None

    def _download(self, job, folder):
        try:
            return Path(self._ask(lambda session: session.download_job_result(job, folder)))
        except Exception:
            return None

    def _fetch(self, job, output):
        with tempfile.TemporaryDirectory() as folder:
            path = self._download(job, folder)
            found = list(path.rglob("result")) if path else []
            if not found:
                raise DeploymentError("The run is finished, but its result could not be fetched; it is at the server.")
            shutil.copytree(found[0], output, dirs_exist_ok=True)
        return output

    def _running(self):
        """A job of this run that is under way already, begun by an earlier operator."""
        found = self._under_way()
        if found is None:
            return None
        log.info("run %s is under way already (job %s)", self._spec.name, found[0])
        return found[0], sorted(self._spec.silos)

    def _under_way(self):
        return next((job for job in self.jobs(_job_name(self._spec)) if job[1].get("state") != ENDED), None)

    def jobs(self, name: str | None = None) -> list[tuple[str, dict[str, Any]]]:
        """The newest job of each run, and its status: of all runs, or of one."""
        found: dict[str, tuple[str, dict[str, Any]]] = {}
        for job in self._ask(lambda session: session.list_jobs(limit=20, reverse=True)):
            title, state = str(job.get("job_name")), str(job.get("status"))
            if title in found or not (title == name if name else title.startswith(JOB)):
                continue
            status = {"run": title.removeprefix(JOB), "state": ENDED} if state.startswith("FINISHED") else None
            if state == "RUNNING":
                status = self._status(job["job_id"])  # a server that was killed calls dead jobs running too
            if status is not None:
                found[title] = (job["job_id"], status)
        return list(found.values())

    def _connected(self):
        """The silos in NVFlare's list, and when each was last heard of."""
        found = self._ask(lambda session: session.get_connected_client_list())
        return {client.name: client.last_connect_time for client in found}

    def _server_started(self):
        return str(self._ask(lambda session: session.get_system_info()).server_info.start_time)

    def _ask(self, question, *, once=False):
        """Ask the server; after a broken connection again, until the deadline."""
        begin = said = time.monotonic()
        while True:
            try:
                with contextlib.redirect_stdout(sys.stderr):  # NVFlare prints what it does; what we print may be JSON
                    if self._session is None:
                        self._session = new_secure_session(OPERATOR, str(self._kit.resolve()), timeout=PATIENCE)
                    return question(self._session)
            except Exception as error:
                if once:
                    raise
                self.close()
                if time.monotonic() - begin > self._spec.deadline:
                    raise DeploymentError(
                        f"The server cannot be reached ({type(error).__name__}) for {self._spec.deadline:g} seconds; "
                        "start it (`sfvi server start`), then the run again."
                    ) from error
                if time.monotonic() - said > 5.0 or said == begin:
                    said = time.monotonic()
                    log.info("waiting for the server")
                time.sleep(POLL)

    def close(self) -> None:
        """End the session."""
        if self._session is not None:
            try:
                self._session.close()
            except Exception:  # it is broken anyway
                log.debug("a session could not be closed")
            self._session = None


def check_output(folder: Path, run: str) -> None:
    """Refuse a folder that holds something else than this run's result, before anything is begun."""
    if folder.exists() and not folder.is_dir():
        raise OptionError(f"The output {str(folder)!r} is a file; name a folder.")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    kept = folder / "fit.npz"
    if not kept.exists():
        raise OptionError(f"The output {str(folder)!r} holds something else already; name a new folder.")
    known = archive.read(kept, kind="fit")[1].get("provenance") or {}
    if known.get("settings", {}).get("name") != run:
        raise OptionError(f"The output {str(folder)!r} holds another fit; name a new folder, or remove that one.")


def recent(kit: Path, run: str | None = None) -> list[dict[str, Any]]:
    """The status of runs that are under way or have ended lately, asked of the server; of all, or of one."""
    operator = Operator(kit, RunSpec(name=run or "any", silos=("any",), deadline=10.0))
    try:
        return [status for _, status in operator.jobs(None if run is None else JOB + run)]
    finally:
        operator.close()


def _job_name(spec):
    return JOB + spec.name


def _write_job(folder, spec, silos):
    """A job that names classes and holds numbers; no code."""
    config = folder / "app" / "config"
    config.mkdir(parents=True)
    encoded = base64.b64encode(json.dumps(spec.to_json()).encode()).decode()
    meta = {"name": _job_name(spec), "resource_spec": {}, "min_clients": len(silos), "mandatory_clients": silos}
    meta["deploy_map"] = {"app": ["server", *silos]}
    filters = {"task_data_filters": [], "task_result_filters": []}
    controller = {
        "id": "controller",
        "path": f"{RUNTIME}.controller.CollabController",
        "args": {"server_obj_id": "role", "sync_task_timeout": 60},
    }
    server = {
        "format_version": 2,
        "server": {"task_request_interval": 0.2},
        "workflows": [controller],
        "components": [{"id": "role", "path": f"{ROLES}.ServerRole", "args": {"spec": encoded}}],
        **filters,
    }
    executor = {"id": "executor", "path": f"{RUNTIME}.executor.CollabExecutor", "args": {"client_obj_id": "role"}}
    client = {
        "format_version": 2,
        "default_task_fetch_interval": 0.2,
        "executors": [{"tasks": ["*"], "executor": executor}],
        "components": [{"id": "role", "path": f"{ROLES}.SiloRole", "args": {}}],
        **filters,
    }
    for path, content in (
        (folder / "meta.json", meta),
        (config / "config_fed_server.json", server),
        (config / "config_fed_client.json", client),
    ):
        path.write_text(json.dumps(content, indent=1))


__all__ = ["Operator", "recent"]
