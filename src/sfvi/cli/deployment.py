"""Commands of deployed runs: kits, server, silos, the run itself."""

import contextlib
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import OptionError
from . import show
from .options import (
    Algorithm,
    AppDir,
    AsJson,
    Key,
    Option,
    Precision,
    Rounds,
    UnitIds,
    UntilConverged,
    examples,
    options_of,
)

deploy_app = typer.Typer(help="Kits for a server and its silos.", no_args_is_help=True)
server_app = typer.Typer(help="The server.", no_args_is_help=True)
silo_app = typer.Typer(help="A silo.", no_args_is_help=True)
flower_app = typer.Typer(help="The same with Flower's own commands.", no_args_is_help=True)

Kits = Annotated[Path, typer.Argument(help="For the kits.")]
Silos = Annotated[list[str], typer.Option(help="Name of a silo; once for each.")]
Host = Annotated[str, typer.Option(help="Under which silos reach the server.")]
Port = Annotated[int, typer.Option(help="Of the server; the only one to open.")]
Kit = Annotated[Path, typer.Option(help="Folder of the kit, from `sfvi deploy init`.", exists=True, file_okay=False)]
FlowerKit = Annotated[Path, typer.Option(help="The kit, from `sfvi flower init`.", exists=True, file_okay=False)]
Model = Annotated[str, typer.Option(help="The model, as module:object.")]
Data = Annotated[str, typer.Option(help="A .csv or .parquet file, or module:function called with the silo's name.")]
Folder = Annotated[Path | None, typer.Option(help="Where runs are kept; by default in the kit.")]
PolicyFile = Annotated[
    Path | None, typer.Option("--policy", help="A TOML file with what may leave the silo.", exists=True, dir_okay=False)
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(deploy_app, name="deploy")
    app.add_typer(server_app, name="server")
    app.add_typer(silo_app, name="silo")
    app.add_typer(flower_app, name="flower")
    app.command(
        epilog=examples("sfvi run --kit kits/operator --name asthma --algorithm Sites --option num_local_steps=500")
    )(run)
    app.command(epilog=examples("sfvi status --kit kits/server", "sfvi status --kit kits/operator --json"))(status)


@deploy_app.command("init", epilog=examples("sfvi deploy init kits --host fl.example.org --silo north --silo south"))
def deploy_init(
    folder: Kits,
    silo: Silos,
    host: Host = "localhost",
    port: Port = 8002,
    valid_days: Annotated[int, typer.Option(help="How long certificates last.", min=1)] = 360,
) -> None:
    """Make startup kits with certificates; again with more silos to add some."""
    from ..deploy.nvflare import kits

    _print_kits(kits.init(folder, host=host, port=port, silos=silo, valid_days=valid_days))


@server_app.command("start", epilog=examples("sfvi server start --kit kits/server --model mymodels:asthma"))
def server_start(
    kit: Kit,
    model: Model,
    app_dir: AppDir = Path(),
    folder: Folder = None,
    precision: Precision = "float32",
) -> None:
    """Start the server; it waits for silos and runs."""
    from ..deploy.nvflare import sites

    mine = sites.prepare(kit, role="server", model=model, app_dir=app_dir, folder=folder, precision=precision)
    mine.configure()
    print(f"server: model {model} ({mine.code().hash[:12]}), runs in {mine.folder}")
    sites.become(kit, mine, role="server")


@silo_app.command("start", epilog=examples("sfvi silo start --kit kits/north --model mymodels:asthma --data north.csv"))
def silo_start(
    kit: Kit,
    model: Model,
    data: Data,
    unit_ids: UnitIds = None,
    app_dir: AppDir = Path(),
    folder: Folder = None,
    precision: Precision = "float32",
    policy: PolicyFile = None,
    check_only: Annotated[bool, typer.Option("--check-only", help="Check model and data, start nothing.")] = False,
) -> None:
    """Check the silo's data, then start it; it takes part in runs until it is stopped."""
    from ..deploy.nvflare import sites

    mine = sites.prepare(
        kit,
        role="client",
        model=model,
        app_dir=app_dir,
        folder=folder,
        data=data,
        unit_ids=unit_ids,
        precision=precision,
        policy=policy,
    )
    mine.configure()
    _introduce(model, mine.silo_to_start(), with_key=not check_only)
    if not check_only:
        sites.become(kit, mine, role="client")


@silo_app.command("key", epilog=examples("sfvi silo key --kit kits/north", "sfvi silo key --kit kits/north --json"))
def silo_key(kit: Kit, folder: Folder = None, json: AsJson = False) -> None:
    """Show the silo's public key for secure sums, made when it is first asked for: a line for others' `peers`."""
    from ..deploy import site
    from ..deploy.silo import public_key

    name, runs = _silo_of(kit), (folder or site.runs_of(kit)).resolve()
    runs.mkdir(parents=True, exist_ok=True)
    runs.chmod(0o700)
    key = public_key(runs)
    if json:
        show.as_json({"silo": name, "key": key})
        return
    print(f'{name} = "{key}"')
    show.aside("Tell it to the other silos over a way that the server has no hand in; it goes into `peers` there.")


@silo_app.command(
    "audit", epilog=examples("sfvi silo audit --kit kits/north --last 20", "sfvi silo audit --kit kits/north --json")
)
def silo_audit(
    kit: Kit,
    run: Annotated[str | None, typer.Option(help="Only messages of this run.")] = None,
    last: Annotated[int | None, typer.Option(help="Only so many, the last ones.", min=0)] = None,
    holds: Annotated[str | None, typer.Option(help="Hash of a last line, as told earlier; it must be there.")] = None,
    folder: Folder = None,
    json: AsJson = False,
) -> None:
    """List what left the silo, and say whether its record is whole.

    Exit codes: 0 whole, 1 broken, or without the line that --holds names; 2 wrong options.
    """
    from ..deploy import site
    from ..deploy.silo import chain_of
    from ..privacy import listing

    chain = chain_of((folder or site.runs_of(kit)).resolve())
    whole, sentence = listing.verdict(chain, holds)
    if json:
        broken = None if chain.broken is None else {"line": chain.broken, "why": chain.why}
        about = {"whole": whole, "broken": broken, "lines": len(chain.entries), "last": chain.last}
        show.as_json({**about, "messages": listing.entries(chain, run=run, last=last)})
    else:
        show.rows(list(listing.HEADER), listing.rows(chain, run=run, last=last), numbers=False)
        print(f"Hash of the last line: {chain.last}")
        print(sentence) if whole else show.aside(sentence)
    if not whole:
        raise typer.Exit(1)


@flower_app.command("init", epilog=examples("sfvi flower init kits --host fl.example.org --silo north --silo south"))
def flower_init(
    folder: Kits,
    silo: Silos,
    host: Host = "localhost",
    port: Port = 8000,
    valid_days: Annotated[int, typer.Option(help="How long the server's certificate lasts.", min=1)] = 360,
) -> None:
    """Make keys and certificates for Flower; again with more silos to add some."""
    from ..deploy.flower import kits

    _print_kits(kits.init(folder, host=host, port=port, silos=silo, valid_days=valid_days))


@flower_app.command("server", epilog=examples("sfvi flower server --folder kits/server --model mymodels:asthma"))
def flower_server(
    folder: FlowerKit,
    model: Model,
    app_dir: AppDir = Path(),
    precision: Precision = "float32",
) -> None:
    """Check the model and print the Flower commands for the server."""
    from ..deploy.flower import sites

    mine = sites.prepare(folder, model=model, app_dir=app_dir, precision=precision)
    code, commands = mine.code(), sites.server_commands(folder)
    sites.install(folder, mine)
    print(f"server: model {model} ({code.hash[:12]}), runs in {mine.folder}\n")
    print(sites.environment(folder), *commands, sep="\n")


@flower_app.command(
    "silo", epilog=examples("sfvi flower silo --folder kits/north --model mymodels:asthma --data north.csv")
)
def flower_silo(
    folder: FlowerKit,
    model: Model,
    data: Data,
    unit_ids: UnitIds = None,
    app_dir: AppDir = Path(),
    precision: Precision = "float32",
    policy: PolicyFile = None,
    port: Annotated[
        int, typer.Option(help="For its own processes; another for each silo of one machine.", min=1, max=65535)
    ] = 9094,
) -> None:
    """Check the silo's data and print the Flower command for it."""
    from ..deploy.flower import sites

    about: dict[str, Any] = {"data": data, "unit_ids": unit_ids, "precision": precision, "policy": policy}
    mine = sites.prepare(folder, model=model, app_dir=app_dir, **about)
    mine.configure()
    _introduce(model, mine.silo_to_start(), with_key=True)
    print()
    sites.install(folder, mine)
    print(sites.environment(folder), sites.silo_command(folder, port=port), sep="\n")


def run(
    kit: Kit,
    name: Annotated[str, typer.Option(help="Of the run; the same name goes on where it was.")],
    algorithm: Algorithm = "SFVI",
    option: Option = None,
    silo: Annotated[list[str] | None, typer.Option(help="Who takes part; by default all with a kit beside.")] = None,
    rounds: Rounds = None,
    key: Key = 0,
    until_converged: UntilConverged = False,
    disclose_elbo: Annotated[bool, typer.Option("--disclose-elbo", help="Let silos tell their ELBO.")] = False,
    secure_sum: Annotated[bool, typer.Option("--secure-sum", help="Let nobody see replies but their sum.")] = False,
    min_silos: Annotated[int | None, typer.Option(help="Go on with so many; by default all are needed.")] = None,
    late: Annotated[float, typer.Option(help="With --min-silos: seconds to wait for the others.")] = 10.0,
    deadline: Annotated[float, typer.Option(help="Seconds to wait for who is needed.")] = 600.0,
    wire: Annotated[str, typer.Option(help="Precision of messages: float32, float64 or bfloat16.")] = "float32",
    reply: Annotated[str | None, typer.Option(help="Precision of replies, if another: bfloat16.")] = None,
    top_k: Annotated[float | None, typer.Option(help="Send this part of a reply's numbers (experiment).")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for the result; by default the run's name.")] = None,
    json: AsJson = False,
) -> None:
    """Run an algorithm over the silos and fetch the result; if it was interrupted, go on.

    Exit codes: 0 done, 1 bad input or a run that broke, 2 wrong options, 130 interrupted: the same command goes on.
    """
    from ..deploy import RunSpec, Wire, site, told
    from ..deploy.nvflare.operator import Operator
    from ..deploy.progress import Screen

    spec = RunSpec(
        name=name,
        silos=_silos(kit, silo),
        algorithm=algorithm,
        options=options_of(option),
        key=key,
        num_rounds=rounds,
        until_converged=until_converged,
        disclose_elbo=disclose_elbo,
        secure_sum=secure_sum,
        min_silos=min_silos,
        late=late,
        deadline=deadline,
        wire=Wire(broadcast=wire, reply=reply or wire, top_k=top_k),
    )
    site.log_to(sys.stderr)
    remarks = told.before(spec)
    show.aside(*remarks)
    with Screen() as screen:
        found = Operator(kit, spec, screen.show).run(output or Path(name))
    spent = told.after(found)
    if json:
        show.as_json({"run": name, "folder": str(found), "privacy": told.plain(spent), "warnings": remarks})
        return
    if spent is not None:
        print(spent)
    print(f"The result is in {found}; read it with sfvi.load({str(found)!r}, model, {{}}), or let")
    print(f"  sfvi report {shlex.quote(str(found))} --model module:object")
    print("tell of it.")


def _introduce(model, silo, *, with_key):
    """What others may want to know of a silo: its model, and its key for secure sums, which is made if need be."""
    print(f"silo {silo.name}: model {model} ({silo.code.hash[:12]}), data are fine")
    show.aside(*silo.gate.policy.remarks)
    with contextlib.suppress(OptionError):  # sfvi[secure] is not installed: no secure sums
        if with_key:
            print(f"silo {silo.name}: its key for secure sums is {silo.public_key}")


def status(
    kit: Kit,
    name: Annotated[str | None, typer.Option(help="Of the run, if the kit is the operator's.")] = None,
    json: AsJson = False,
) -> None:
    """Say where runs stand: the server's or a silo's, from its kit; from the operator's those of late.

    Exit codes: 0 told, 1 bad input, or a silo that sends nothing since its record is broken or gone; 2 wrong options.
    """
    from ..deploy import site, spending
    from ..deploy import status as statuses

    folders = sorted(site.runs_of(kit).glob("*/"))
    found = statuses.all_in(folders)
    silo = spending.of_silo(site.runs_of(kit), site.policy_of(kit))
    runs, whole = silo.pop("runs", {}), silo.get("record", "whole") == "whole"
    found = [{**each, "privacy": runs[each["run"]]} if each["run"] in runs else each for each in found]
    if not folders and (kit / "startup" / "fed_admin.json").is_file():
        from ..deploy.nvflare.operator import recent

        found = recent(kit, name)
    if json:
        show.as_json({"runs": found, **silo})
    else:
        for each in found:
            print(statuses.line(each) + (f"  {spending.line(each['privacy'])}" if "privacy" in each else ""))
        if not found:
            print("No run is known here.")
        if silo.get("budget"):
            print(f"all runs of this silo: {spending.line(silo['budget'])}")
        if not whole:
            show.aside(f"This silo sends nothing: {silo['record']}.")
    if not whole:
        raise typer.Exit(1)


def _silo_of(kit):
    """The name of the silo whose kit this is, NVFlare's or Flower's."""
    if (kit / "startup").is_dir():
        from ..deploy.nvflare import kits

        return kits.check(kit, role="client")
    from ..deploy.flower import kits as flower_kits

    name = flower_kits.read(kit)["name"]
    if name == flower_kits.SERVER:
        raise OptionError(f"{str(kit)!r} is the server's kit; only silos have keys for secure sums.")
    return name


def _print_kits(made):
    for name, kit in made.items():
        print(f"{name:>20}  {kit}")
    print("Hand each silo its own kit over a safe way; keep `authority` to yourself.")


def _silos(kit, chosen):
    """Who takes part: those chosen, or all for whom kits were made, if that is known here."""
    from ..deploy.ledger import read_json

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
