"""Commands of fits on this machine: fit, report, diagnose."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

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
    pairs,
)

DOUBTFUL = 3  # exit code of `diagnose`
SILO_FORM = "NAME=FILE or NAME=module:function"

Silos = Annotated[
    list[str] | None,
    typer.Option(
        "--silo", help="NAME=FILE, a .csv or .parquet file, or NAME=module:function called with the name; for each."
    ),
]
Run = Annotated[Path, typer.Argument(help="A folder that sfvi fit, sfvi run or Fit.save wrote; or a silo's own file.")]
Model = Annotated[str | None, typer.Option(help="The model, as module:object, if the folder does not say it.")]
Network = Annotated[
    str | None, typer.Option("--algorithm", help="As module:object, if it had an inference network and a deployed run.")
]
Place = Annotated[Path | None, typer.Option("--app-dir", help="Where modules are looked for beside installed ones.")]
OfRun = Annotated[str | None, typer.Option("--precision", help="Of the fit, if the folder does not say it: float32.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(
        epilog=examples(
            "sfvi fit --model mymodels:asthma --silo north=north.csv --silo south=south.csv --output asthma",
            "sfvi fit --formula 'y ~ x + (1 | silo)' --family bernoulli --silo a=a.csv --silo b=b.csv --output ab",
        )
    )(fit)
    app.command(
        epilog=examples(
            "sfvi report asthma",
            "sfvi report asthma --silo north=north.csv --output for-north.html",
        )
    )(report)
    app.command(epilog=examples("sfvi diagnose asthma --silo north=north.csv --silo south=south.csv"))(diagnose)


def fit(
    silo: Silos = None,
    model: Annotated[str | None, typer.Option(help="The model, as module:object.")] = None,
    formula: Annotated[str | None, typer.Option(help="A mixed model by formula, instead of --model.")] = None,
    family: Annotated[str | None, typer.Option(help="Of a formula: gaussian, bernoulli, poisson, ...")] = None,
    missing: Annotated[str, typer.Option(help="Rows with missing values, with a formula: error or drop.")] = "error",
    raw: Annotated[bool, typer.Option("--no-standardize", help="Take a formula's predictors as they are.")] = False,
    algorithm: Algorithm = "SFVI",
    option: Option = None,
    rounds: Rounds = None,
    key: Key = 0,
    until_converged: UntilConverged = False,
    unit_ids: UnitIds = None,
    precision: Precision = "float32",
    app_dir: AppDir = Path(),
    output: Annotated[Path, typer.Option(help="Folder for the result: a new one.")] = Path("fit-output"),
    checkpoint: Annotated[Path | None, typer.Option(help="File from which the same command goes on.")] = None,
    json: AsJson = False,
) -> None:
    """Fit a model to silos on this machine, print the global posterior and keep the result in a folder.

    Exit codes: 0 done, 1 bad input or a fit that broke, 2 wrong options, 130 interrupted.
    """
    from ..studies import Study, run

    study = Study(
        silos=pairs("--silo", silo, SILO_FORM),
        model=model,
        formula=formula,
        family=family,
        missing=missing,
        standardize=not raw,
        unit_ids=unit_ids,
        app_dir=str(app_dir),
        algorithm=algorithm,
        options=options_of(option),
        key=key,
        num_rounds=rounds,
        until_converged=until_converged,
        precision=precision,
    )
    try:
        found = run(study, output, checkpoint=checkpoint, say=show.begin)
    except KeyboardInterrupt:
        going_on = "nothing is kept; with --checkpoint FILE one can go on"
        show.aside(f"Interrupted; {'the same command goes on' if checkpoint else going_on}.")
        raise typer.Exit(130) from None
    show.aside(*found.remarks)
    if json:
        show.as_json(found.to_dict())
        return
    print(found.fit, *found.notes, sep="\n")
    for title, table in found.tables.items():
        show.table(title, table)
    if len(found.silos):
        show.table("Silos", found.silos)
    sources = shlex.join(part for item in silo or [] for part in ("--silo", item))
    print(f"The result is in {output}. How far the posterior can be trusted is not known yet: diagnose finds out.")
    for command in ("diagnose", "report"):
        print(f"  sfvi {command} {shlex.quote(str(output))} {sources}")


def report(
    run: Run,
    model: Model = None,
    silo: Silos = None,
    output: Annotated[Path | None, typer.Option(help="The report's file; by default in the folder.")] = None,
    no_diagnosis: Annotated[bool, typer.Option("--no-diagnosis", help="Leave the diagnosis out.")] = False,
    algorithm: Network = None,
    unit_ids: UnitIds = None,
    precision: OfRun = None,
    app_dir: Place = None,
    json: AsJson = False,
) -> None:
    """Write the report of a result as an HTML file; with --silo also that silo's own, which is for the silo.

    It shows what sfvi diagnose kept beside the result, if that is of this fit; otherwise the diagnosis is made now.

    Exit codes: 0 done, 1 bad input, 2 wrong options.
    """
    from .. import studies

    source = _source(model, silo, algorithm, unit_ids, precision, app_dir)
    made = studies.report(run, source, output, diagnosed=not no_diagnosis, say=show.aside)
    if json:
        kept = None if made.kept is None else str(made.kept)
        show.as_json({"reports": [str(path) for path in made.paths], "diagnosis": kept})
    else:
        print(*(f"The report is in {path}." for path in made.paths), made.diagnosis, sep="\n")


def diagnose(
    run: Run,
    model: Model = None,
    silo: Silos = None,
    algorithm: Network = None,
    unit_ids: UnitIds = None,
    precision: OfRun = None,
    app_dir: Place = None,
    json: AsJson = False,
) -> None:
    """Say how far to trust a result: fine, doubtful or do not trust; with --silo more can be checked.

    What is found of the global posterior is kept beside the result, in diagnosis.json, for sfvi report.

    Exit codes: 0 fine, 1 bad input, 2 wrong options, 3 doubtful or do not trust.
    """
    from .. import studies

    source = _source(model, silo, algorithm, unit_ids, precision, app_dir)
    found = studies.diagnose(run, source, say=show.aside)
    if json:
        show.as_json(found.to_dict())
    else:
        if found.fit is not None:
            print(found.fit)
        for name, judged in found.silos.items():
            print(f"Silo {name}: {judged}")
    if found.trust != "fine":
        raise typer.Exit(DOUBTFUL)


def _source(model, silo, algorithm, unit_ids, precision, app_dir):
    from ..studies import Source

    return Source(
        silos=pairs("--silo", silo, SILO_FORM),
        model=model,
        algorithm=algorithm,
        unit_ids=unit_ids,
        app_dir=None if app_dir is None else str(app_dir),
        precision=precision,
    )
