"""The command line: parse, call, print."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from . import demo as demos
from .errors import OptionError, SfviError

app = typer.Typer(help="Hierarchical Bayesian models over data that may not be pooled.", no_args_is_help=True)
deploy_app = typer.Typer(help="Kits for a server and its silos.", no_args_is_help=True)
server_app = typer.Typer(help="The server.", no_args_is_help=True)
silo_app = typer.Typer(help="A silo.", no_args_is_help=True)
app.add_typer(deploy_app, name="deploy")
app.add_typer(server_app, name="server")
app.add_typer(silo_app, name="silo")
flower_app = typer.Typer(help="The same with Flower's own commands.", no_args_is_help=True)
app.add_typer(flower_app, name="flower")

Kits = Annotated[Path, typer.Argument(help="For the kits.")]
Silos = Annotated[list[str], typer.Option(help="Name of a silo; once for each.")]
Host = Annotated[str, typer.Option(help="Under which silos reach the server.")]
Port = Annotated[int, typer.Option(help="Of the server; the only one to open.")]
Kit = Annotated[Path, typer.Option(help="Folder of the kit, from `sfvi deploy init`.", exists=True, file_okay=False)]
FlowerKit = Annotated[Path, typer.Option(help="The kit, from `sfvi flower init`.", exists=True, file_okay=False)]
Model = Annotated[str, typer.Option(help="The model, as module:object.")]
Data = Annotated[str, typer.Option(help="A .csv or .parquet file, or module:function called with the silo's name.")]
UnitIds = Annotated[
    str | None, typer.Option(help="Column with the units' ids, whole numbers; the program does not see it.")
]
AppDir = Annotated[Path, typer.Option(help="Where modules are looked for beside installed ones.", exists=True)]
Folder = Annotated[Path | None, typer.Option(help="Where runs are kept; by default in the kit.")]
Precision = Annotated[str, typer.Option(help="float32 or float64, the same everywhere.")]


@app.callback()
def main_options() -> None:
    """Hierarchical Bayesian models over data that may not be pooled."""


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("demo-output"),
    rounds: Annotated[int, typer.Option(help="Rounds of SFVI.", min=1)] = 10_000,
    sites_rounds: Annotated[int, typer.Option(help="Rounds of Sites.", min=1)] = 15,
    draws: Annotated[int, typer.Option(help="NUTS draws per chain.", min=100)] = 1500,
) -> None:
    """Fit the six-cities mixed model over two silos and compare with NUTS on pooled and on single silos' data."""
    demos.six_cities(output, num_rounds=rounds, sites_rounds=sites_rounds, num_draws=draws)


@app.command()
def reproduce(
    name: Annotated[str | None, typer.Argument(help="Of the experiment; without one they are listed.")] = None,
    preset: Annotated[str, typer.Option(help="quick (minutes) or paper (hours).")] = "quick",
    only: Annotated[str, typer.Option(help="Run only cells whose name holds this.")] = "",
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget what earlier runs found.")] = False,
    folder: Annotated[Path, typer.Option(help="With the experiments' specifications.")] = Path("experiments"),
) -> None:
    """Make a table or figure: run what is missing, fill its README, draw its picture. Go on after a kill."""
    from functools import partial

    from . import experiments

    if name is None:
        print("\n".join(experiments.names(folder)) or f"There are no experiments in {folder}.")
        return
    say = partial(print, flush=True)  # into a log too
    try:
        found = experiments.reproduce(
            folder, experiments.EXPERIMENTS, name, preset=preset, only=only, fresh=fresh, say=say
        )
    except KeyboardInterrupt:
        print("Interrupted; the same command goes on.", file=sys.stderr)
        raise typer.Exit(130) from None
    print(found)
    print(f"Kept in {folder / name / preset}.json and .png.")


@deploy_app.command("init")
def deploy_init(
    folder: Kits,
    silo: Silos,
    host: Host = "localhost",
    port: Port = 8002,
    valid_days: Annotated[int, typer.Option(help="How long certificates last.", min=1)] = 360,
) -> None:
    """Make startup kits with certificates; again with more silos to add some."""
    from .deploy.nvflare import kits

    _print_kits(kits.init(folder, host=host, port=port, silos=silo, valid_days=valid_days))


@server_app.command("start")
def server_start(
    kit: Kit,
    model: Model,
    app_dir: AppDir = Path(),
    folder: Folder = None,
    precision: Precision = "float32",
) -> None:
    """Start the server; it waits for silos and runs."""
    from .deploy.nvflare import sites

    mine = sites.prepare(kit, role="server", model=model, app_dir=app_dir, folder=folder, precision=precision)
    mine.configure()
    print(f"server: model {model} ({mine.code().hash[:12]}), runs in {mine.folder}")
    sites.become(kit, mine, role="server")


@silo_app.command("start")
def silo_start(
    kit: Kit,
    model: Model,
    data: Data,
    unit_ids: UnitIds = None,
    app_dir: AppDir = Path(),
    folder: Folder = None,
    precision: Precision = "float32",
    check_only: Annotated[bool, typer.Option("--check-only", help="Check model and data, start nothing.")] = False,
) -> None:
    """Check the silo's data, then start it; it takes part in runs until it is stopped."""
    from .deploy.nvflare import sites

    mine = sites.prepare(
        kit,
        role="client",
        model=model,
        app_dir=app_dir,
        folder=folder,
        data=data,
        unit_ids=unit_ids,
        precision=precision,
    )
    mine.configure()
    print(f"silo {mine.name}: model {model} ({mine.silo().code.hash[:12]}), data are fine")
    if not check_only:
        sites.become(kit, mine, role="client")


@flower_app.command("init")
def flower_init(
    folder: Kits,
    silo: Silos,
    host: Host = "localhost",
    port: Port = 8000,
    valid_days: Annotated[int, typer.Option(help="How long the server's certificate lasts.", min=1)] = 360,
) -> None:
    """Make keys and certificates for Flower; again with more silos to add some."""
    from .deploy.flower import kits

    _print_kits(kits.init(folder, host=host, port=port, silos=silo, valid_days=valid_days))


@flower_app.command("server")
def flower_server(
    folder: FlowerKit,
    model: Model,
    app_dir: AppDir = Path(),
    precision: Precision = "float32",
) -> None:
    """Check the model and print the Flower commands for the server."""
    from .deploy.flower import sites

    mine = sites.prepare(folder, model=model, app_dir=app_dir, precision=precision)
    code, commands = mine.code(), sites.server_commands(folder)
    sites.install(folder, mine)
    print(f"server: model {model} ({code.hash[:12]}), runs in {mine.folder}\n")
    print(sites.environment(folder), *commands, sep="\n")


@flower_app.command("silo")
def flower_silo(
    folder: FlowerKit,
    model: Model,
    data: Data,
    unit_ids: UnitIds = None,
    app_dir: AppDir = Path(),
    precision: Precision = "float32",
    port: Annotated[
        int, typer.Option(help="For its own processes; another for each silo of one machine.", min=1, max=65535)
    ] = 9094,
) -> None:
    """Check the silo's data and print the Flower command for it."""
    from .deploy.flower import sites

    mine = sites.prepare(folder, model=model, app_dir=app_dir, data=data, unit_ids=unit_ids, precision=precision)
    mine.configure()
    print(f"silo {mine.name}: model {model} ({mine.silo().code.hash[:12]}), data are fine\n")
    sites.install(folder, mine)
    print(sites.environment(folder), sites.silo_command(folder, port=port), sep="\n")


@app.command()
def run(
    kit: Kit,
    name: Annotated[str, typer.Option(help="Of the run; the same name goes on where it was.")],
    algorithm: Annotated[str, typer.Option(help="SFVI, SFVIAvg, Sites, or module:object.")] = "SFVI",
    option: Annotated[list[str] | None, typer.Option(help="Of the algorithm, as name=value; once for each.")] = None,
    silo: Annotated[list[str] | None, typer.Option(help="Who takes part; by default all with a kit beside.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds; by default what mostly suffices.", min=1)] = None,
    key: Annotated[int, typer.Option(help="Of all randomness.")] = 0,
    until_converged: Annotated[bool, typer.Option("--until-converged", help="Stop when nothing moves.")] = False,
    disclose_elbo: Annotated[bool, typer.Option("--disclose-elbo", help="Let silos tell their ELBO.")] = False,
    min_silos: Annotated[int | None, typer.Option(help="Go on with so many; by default all are needed.")] = None,
    late: Annotated[float, typer.Option(help="With --min-silos: seconds to wait for the others.")] = 10.0,
    deadline: Annotated[float, typer.Option(help="Seconds to wait for who is needed.")] = 600.0,
    wire: Annotated[str, typer.Option(help="Precision of messages: float32, float64 or bfloat16.")] = "float32",
    reply: Annotated[str | None, typer.Option(help="Precision of replies, if another: bfloat16.")] = None,
    top_k: Annotated[float | None, typer.Option(help="Send this part of a reply's numbers (experiment).")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for the result; by default the run's name.")] = None,
) -> None:
    """Run an algorithm over the silos and fetch the result; if it was interrupted, go on."""
    from .deploy import RunSpec, Wire, site
    from .deploy.nvflare.operator import Operator
    from .deploy.progress import Screen

    spec = RunSpec(
        name=name,
        silos=_silos(kit, silo),
        algorithm=algorithm,
        options=dict(map(_option, option or [])),
        key=key,
        num_rounds=rounds,
        until_converged=until_converged,
        disclose_elbo=disclose_elbo,
        min_silos=min_silos,
        late=late,
        deadline=deadline,
        wire=Wire(broadcast=wire, reply=reply or wire, top_k=top_k),
    )
    site.log_to(sys.stderr)
    with Screen() as screen:
        found = Operator(kit, spec, screen.show).run(output or Path(name))
    print(f"The result is in {found}; read it with sfvi.load({str(found)!r}, model, {{}}).")


@app.command()
def status(
    kit: Kit,
    name: Annotated[str | None, typer.Option(help="Of the run, if the kit is the operator's.")] = None,
) -> None:
    """Say where runs stand: the server's or a silo's, from its kit; from the operator's what is under way."""
    from .deploy import status as statuses
    from .deploy.site import runs_of

    folders = sorted(runs_of(kit).glob("*/"))
    lines = [statuses.line(found) for folder in folders if (found := statuses.read(folder))]
    lines += [found for folder in folders if (found := statuses.at_silo(folder))]
    if not folders and (kit / "startup" / "fed_admin.json").is_file():
        from .deploy.nvflare.operator import under_way

        lines = [statuses.line(found) for found in under_way(kit, name)]
    print("\n".join(lines) if lines else "No run is known here.")


def _print_kits(made):
    for name, kit in made.items():
        print(f"{name:>20}  {kit}")
    print("Hand each silo its own kit over a safe way; keep `authority` to yourself.")


def _silos(kit, chosen):
    """Who takes part: those chosen, or all for whom kits were made, if that is known here."""
    from .deploy.ledger import read_json

    path = kit.resolve().parent / "project.json"
    known = read_json(path)["silos"] if path.exists() else None
    if not chosen and known is None:
        raise OptionError("Say who takes part: --silo NAME for each.")
    for name in chosen or ():
        if known is not None and name not in known:
            raise OptionError(
                f"--silo {name}: kits were made for {', '.join(known)}; make one for it, or mend the name."
            )
    return tuple(sorted(chosen or known or ()))


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise OptionError(f"--option {text!r}: write name=value.")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def main() -> None:
    """Entry point of the `sfvi` command."""
    try:
        app()
    except SfviError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        print(f"{error.filename or 'A file'} cannot be used: {error.strerror or error}.", file=sys.stderr)
        sys.exit(1)
    except ImportError as error:
        if error.name and error.name.split(".")[0] in ("nvflare", "flwr"):
            print(f"This needs {error.name}; pip install 'sfvi[{error.name.split('.')[0]}]'.", file=sys.stderr)
            sys.exit(1)
        raise
