"""Commands about this machine and this method: demo, reproduce, bench, doctor."""

from pathlib import Path
from typing import Annotated

import typer

from . import show
from .options import AsJson, examples


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(epilog=examples("sfvi demo --output pictures"))(demo)
    app.command(epilog=examples("sfvi reproduce six_cities --preset quick"))(reproduce)
    app.command(epilog=examples("sfvi bench --quick"))(bench)
    app.command(epilog=examples("sfvi doctor", "sfvi doctor --json"))(doctor)


def demo(
    output: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("demo-output"),
    rounds: Annotated[int, typer.Option(help="Rounds of SFVI.", min=1)] = 10_000,
    sites_rounds: Annotated[int, typer.Option(help="Rounds of Sites.", min=1)] = 15,
    draws: Annotated[int, typer.Option(help="NUTS draws per chain.", min=100)] = 1500,
) -> None:
    """Fit the six-cities mixed model over two silos and compare with NUTS on pooled and on single silos' data."""
    from .. import demo as demos

    demos.six_cities(output, num_rounds=rounds, sites_rounds=sites_rounds, num_draws=draws)


def reproduce(
    name: Annotated[str | None, typer.Argument(help="Of the experiment; without one they are listed.")] = None,
    preset: Annotated[str, typer.Option(help="quick (minutes) or paper (hours).")] = "quick",
    only: Annotated[str, typer.Option(help="Run only cells whose name holds this.")] = "",
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget what earlier runs found.")] = False,
    folder: Annotated[Path, typer.Option(help="With the experiments' specifications.")] = Path("experiments"),
    json: Annotated[bool, typer.Option("--json", help="Print the list as one JSON object.")] = False,
) -> None:
    """Make a table or figure: run what is missing, fill its README, draw its picture. Go on after a kill.

    Exit codes: 0 done, 1 bad input, 2 wrong options, 130 interrupted: the same command goes on.
    """
    from functools import partial

    from .. import experiments

    if name is None:
        known = experiments.names(folder)
        if json:
            show.as_json({"experiments": known})
        else:
            elsewhere = "say where they are with --folder, or go to the repository's root"
            print("\n".join(known) or f"There are no experiments in {str(folder)!r}; {elsewhere}.")
        return
    if json:
        raise typer.BadParameter("--json is for the list; what an experiment finds is kept as JSON beside it.")
    say = partial(print, flush=True)  # into a log too
    try:
        found = experiments.reproduce(
            folder, experiments.EXPERIMENTS, name, preset=preset, only=only, fresh=fresh, say=say
        )
    except KeyboardInterrupt:
        show.aside("Interrupted; the same command goes on.")
        raise typer.Exit(130) from None
    print(found)
    print(f"Kept in {folder / name / preset}.json and .png.")


def bench(
    quick: Annotated[bool, typer.Option("--quick", help="Less than a minute; the ratios are noisier.")] = False,
    json: AsJson = False,
) -> None:
    """Measure SFVI on this machine: six cities, against a hand-written JAX loop and numpyro.infer.SVI on pooled data.

    Exit codes: 0 done, 1 if they did not end at the same ELBO, so that the comparison is void.
    """
    from .. import bench as benchmark

    show.aside("Measuring; this takes less than a minute." if quick else "Measuring; this takes minutes.")
    found = benchmark.measure(quick=quick)
    if json:
        show.as_json(found.to_dict())
    else:
        show.table("Six cities over two silos, one process", found.table, "{:,.2f}")
        print("A ratio below 1 says that SFVI is faster; ratios carry over to other machines, rounds/s do not.")
    if found.agree is False:
        show.aside("They did not end at the same ELBO: the comparison is void.")
        raise typer.Exit(1)


def doctor(json: AsJson = False) -> None:
    """Examine this machine: packages, devices, a small fit with a known answer, data sets, what deployment needs.

    Exit codes: 0 all that is needed is there, 1 something needed is missing or broken.
    """
    from .. import doctor as doctors

    findings = doctors.examine()
    if json:
        show.as_json(doctors.to_dict(findings))
    else:
        cells = [[f.part, f.name, f.state, f.found + (f"; {f.remedy}" if f.remedy else "")] for f in findings]
        show.rows(["", "", "", ""], cells, numbers=False)
    if not doctors.healthy(findings):
        raise typer.Exit(1)
