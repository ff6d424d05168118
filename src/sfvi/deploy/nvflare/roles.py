"""The two objects that NVFlare makes in its job processes: they only carry bytes."""

import base64
import hashlib
import json
import logging
import os
import queue
import shutil
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYetError
from pathlib import Path

from nvflare.collab import collab
from nvflare.collab.api.exceptions import RunAborted

from ...errors import SfviError
from .. import site, status
from ..exchange import InterruptedRunError, Lost
from ..server import Server
from ..silo import log_refusal, refusal, scrubbed
from ..spec import RunSpec

log = logging.getLogger("sfvi")
WAIT = 2.0  # seconds that a call waits for a silo's work before it says "still at it"
CALL_TIMEOUT = WAIT + 6.0  # a silo that says nothing at all for so long ...
TRIES = 2  # ... so many times in a row is gone
OUTCOME = "outcome.json"
STATUS_TOPIC = "sfvi.status"


class SiloRole:
    """A silo in NVFlare's client job process: one worker, which keeps its compiled functions through the run."""

    def __init__(self):
        _end_with_parent()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="sfvi")
        self._guard = threading.Lock()
        self._current: tuple[bytes, Future] | None = None
        self._silo = None

    @collab.publish
    def ask(self, request: bytes) -> bytes:
        """Take a message; the answer, or nothing yet if the work takes longer."""
        digest = hashlib.sha256(request).digest()
        with self._guard:
            if self._current is None or self._current[0] != digest:
                self._current = (digest, self._worker.submit(self._handle, request))
            future = self._current[1]
        return self._answer(future)

    @collab.publish
    def wait(self) -> bytes:
        """The answer to the last message, or nothing yet."""
        with self._guard:
            current = self._current
        return b"" if current is None else self._answer(current[1])

    def _answer(self, future):
        try:
            return future.result(timeout=WAIT)
        except NotYetError:
            return b""

    def _handle(self, request):
        try:
            if self._silo is None:
                site.log_to()
                mine = site.here()
                self._lock = site.lock(Path(mine.folder))
                self._silo = mine.silo()
                log.info("silo %s is ready", mine.name)
            return self._silo.handle(request)
        except Exception as error:  # NVFlare would send its text
            log_refusal(error)
            return refusal(scrubbed(error))


class ServerRole:
    """The server in NVFlare's server job process.

    Args:
        spec: The run, as base64 of JSON (NVFlare reads braces in its configuration as variables).
    """

    def __init__(self, spec: str):
        self._spec = RunSpec.from_json(json.loads(base64.b64decode(spec)))

    @collab.main
    def main(self):
        """Run, and leave word of how it ended for the operator."""
        _end_with_parent()
        site.log_to()
        mine, spec = site.here(), self._spec
        folder = Path(mine.folder)
        context = collab.fl_ctx
        began = time.time()
        context.get_engine().register_app_command(STATUS_TOPIC, _tell_status, folder / spec.name, began)
        word = {"state": "finished", "reason": None}
        try:
            self._lock = site.lock(folder)
            Server(spec, mine.code(), folder, CollabTransport()).run()
        except (RunAborted, InterruptedRunError) as error:
            word = {"state": "interrupted", "reason": str(error)}
        except SfviError as error:
            word = {"state": "failed", "reason": str(error)}
        except Exception as error:
            log.exception("failed")
            word = {"state": "failed", "reason": f"the server failed ({type(error).__name__}); its log says why"}
        here = Path(collab.workspace.get_run_dir(context.get_job_id()))
        (here / OUTCOME).write_text(json.dumps(word))
        if word["state"] == "finished":
            shutil.copytree(folder / spec.name / "result", here / "result", dirs_exist_ok=True)


def _end_with_parent():
    """End when the site does, which this process would try to reach for ever; what is on disk is enough to go on."""
    parent = os.getppid()

    def watch():
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="sfvi-parent", daemon=True).start()


def _tell_status(topic, data, fl_ctx, folder, began):
    """The run's status, unless an earlier attempt left it."""
    del topic, data, fl_ctx
    found = status.read(folder) or {}
    return found if found.get("time", 0.0) >= began else {"run": folder.name, "state": "starting"}


class CollabTransport:
    """Calls of NVFlare's Collab API, a thread for each silo."""

    def __init__(self):
        self._proxies = {proxy.name: proxy for proxy in collab.clients}
        self._threads = ThreadPoolExecutor(max(1, len(self._proxies)), thread_name_prefix="sfvi")
        self._answers: queue.Queue = queue.Queue()
        self._context = collab.context

    @property
    def forgetful(self) -> bool:
        """False: client job processes live as long as the job."""
        return False

    def send(self, name: str, request: bytes) -> None:
        """Begin a call."""
        if name not in self._proxies:
            self._answers.put((name, Lost("it is not connected", gone=True)))
            return
        self._threads.submit(self._call, name, request)

    def receive(self, timeout: float) -> tuple[str, bytes | Lost] | None:
        """The next answer."""
        if self._context.is_aborted():
            raise InterruptedRunError("NVFlare ended the job.")
        try:
            return self._answers.get(timeout=timeout)
        except queue.Empty:
            return None

    def _call(self, name, request):
        proxy, failures, asked = self._proxies[name], 0, False
        while True:
            try:
                call = proxy(timeout=CALL_TIMEOUT)
                answer = call.wait() if asked else call.ask(request)
                asked, failures = True, 0
                if answer:
                    self._answers.put((name, bytes(answer)))
                    return
            except RunAborted:
                self._answers.put((name, Lost("NVFlare ended the job", gone=True)))
                return
            except Exception as error:
                failures, asked = failures + 1, False
                if failures >= TRIES or self._context.is_aborted():
                    self._answers.put((name, Lost(str(error), gone=True)))
                    return
                time.sleep(0.5)
