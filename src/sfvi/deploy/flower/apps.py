"""The two Flower apps; a Flower app folder names them, see `sites`, and carries no code."""

import json
import logging
import sys
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from ...errors import DeploymentError, OptionError
from .. import plan, site
from ..code import Code
from ..server import Server
from ..silo import log_refusal, refusal, scrubbed
from ..spec import RunSpec
from ..wire import Wire
from . import kits
from .transport import FIELD, RECORD, SECONDS_TO_LIVE, GridTransport

log = logging.getLogger("sfvi")
client_app = ClientApp()
server_app = ServerApp()
SECONDS_PER_ROUND = 8.0  # of two silos (benchmarks/DEPLOY.md): 6 are Flower's own, then JAX is imported and traces anew
LONG = 3600.0


@client_app.query()
def answer(message: Message, context: Context) -> Message:
    """Answer the server as the silo of this node; Flower would send the text of an error, so none leaves."""
    try:
        reply = _answer(message, context)
    except Exception as error:
        log_refusal(error)
        reply = refusal(scrubbed(error))
    return Message(RecordDict({RECORD: ConfigRecord({FIELD: reply})}), reply_to=message)


def _answer(message, context):
    site.log_to(sys.stdout)
    path = context.node_config.get("site")
    if not isinstance(path, str):
        raise DeploymentError("its node was started without site=...; use the command of `sfvi flower silo`")
    mine = site.read(path)
    mine.configure()
    handle = site.lock(Path(mine.folder), seconds=SECONDS_TO_LIVE)  # a step of an interrupted attempt may still run
    try:
        record: Any = message.content[RECORD]
        return mine.silo().handle(record[FIELD])
    finally:
        site.unlock(handle)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run, or go on; the result stays in the server's folder."""
    site.log_to(sys.stdout)
    chosen = context.run_config
    path = Path(str(chosen.get("site", "")))
    if not path.is_file():
        raise OptionError(f"site is {str(path)!r}, which is no file; `sfvi flower server` writes it.")
    mine = site.read(path)
    mine.configure()
    table = kits.table(path.parent)
    spec = spec_of(dict(chosen), sorted(table))
    unknown = sorted(set(spec.silos) - set(table))
    if unknown:
        raise OptionError(f"There is no key of silo {unknown[0]!r}; `sfvi flower init --silo {unknown[0]}` makes it.")
    code = mine.code()
    log.info("%s", estimate(spec, code))
    folder = Path(mine.folder)
    handle = site.lock(folder)
    try:
        fit = Server(spec, code, folder, GridTransport(grid, table)).run()
    finally:
        site.unlock(handle)
    if fit.privacy is not None:
        log.info("%s", fit.privacy)
    result = folder / spec.name / "result"
    log.info("the result is in %s; read it with sfvi.load(%r, model, {})", result, str(result))


def spec_of(chosen: dict[str, Any], known: list[str]) -> RunSpec:
    """The run that a Flower run configuration describes; `known` silos are all there are."""
    try:
        options = json.loads(str(chosen["options"]) or "{}")
    except ValueError:
        raise OptionError(f'options is {chosen["options"]!r}; give JSON, like {{"num_local_steps": 50}}.') from None
    silos = tuple(sorted(name.strip() for name in str(chosen["silos"]).split(",") if name.strip()))
    plain = {
        "name": chosen["name"],
        "silos": list(silos or known),
        "algorithm": chosen["algorithm"],
        "options": options,
        "key": chosen["key"],
        "num_rounds": chosen["rounds"] or None,
        "until_converged": chosen["until-converged"],
        "min_silos": chosen["min-silos"] or None,
        "late": chosen["late"],
        "deadline": chosen["deadline"],
        "disclose_elbo": chosen["disclose-elbo"],
        "secure_sum": chosen["secure-sum"],
    }
    reply = chosen["reply"] or chosen["wire"]
    wire = Wire(broadcast=chosen["wire"], reply=reply, top_k=chosen["top-k"] or None)
    return RunSpec.from_json({**plain, "wire": {"broadcast": wire.broadcast, "reply": reply, "top_k": wire.top_k}})


def estimate(spec: RunSpec, code: Code) -> str:
    """How long a run takes at least, and what to do if that is long."""
    options = spec.chosen(code)
    rounds = plan.num_rounds(spec, options)
    seconds = rounds * SECONDS_PER_ROUND
    name = type(options).__name__
    if seconds < LONG:
        return f"{rounds:,} rounds of {name} take about {max(1, round(seconds / 60))} min with Flower, and their work"
    return (
        f"{rounds:,} rounds of {name} take about {seconds / 3600:.0f} hours with Flower; Sites needs about 40 rounds, "
        "or use NVFlare"
    )
