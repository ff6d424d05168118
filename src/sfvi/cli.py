"""The command line: parse, call, print."""

from pathlib import Path
from typing import Annotated

import typer

from . import demo as demos

app = typer.Typer(help="Hierarchical Bayesian models over data that may not be pooled.", no_args_is_help=True)


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


def main() -> None:
    """Entry point of the `sfvi` command."""
    app()
