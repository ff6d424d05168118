"""Both sides of a run in one process: silos are asked directly."""

from sfvi.deploy.code import Code
from sfvi.deploy.direct import Direct
from sfvi.deploy.exchange import Lost
from sfvi.deploy.server import Server
from sfvi.deploy.silo import Silo
from sfvi.deploy.spec import RunSpec
from sfvi.deploy.wire import Wire
from sfvi.privacy import Policy

from . import small

OPEN = Policy(disclose=("num_units", "theta", "elbo"))
EXACT = Wire(broadcast="float64", reply="float64")


class CrashError(Exception):
    """The process that does this is gone."""


def code():
    return Code("tests.deploy.small:model")


def make_silos(folder, names=tuple(small.SIZES), load=small.load, policy=OPEN):
    return {name: Silo(name, code(), load(name), folder / name, policy) for name in names}


def spec(**options):
    return RunSpec(**{"name": "run", "silos": tuple(sorted(small.SIZES)), "num_rounds": 12, "wire": EXACT, **options})


def serve(folder, chosen, transport):
    return Server(chosen, code(), folder / "server", transport)


__all__ = ["EXACT", "CrashError", "Direct", "Lost", "code", "make_silos", "serve", "spec"]
