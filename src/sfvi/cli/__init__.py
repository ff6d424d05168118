"""The command line: parse, call, print."""

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from ..errors import SfviError
from . import deployment, machine, studies

__all__ = ["app", "main"]

EXIT_CODES = """\
Exit codes: 0 done; 1 bad input or something broke, with one sentence about it on standard error; 2 wrong options; 3 (of
diagnose) doubtful or do not trust; 130 interrupted."""
EXTRAS = {"nvflare": "nvflare", "flwr": "flower"}  # by module

# An error's picture of local variables could show a silo's data.
app = typer.Typer(no_args_is_help=True, epilog=EXIT_CODES.replace("\n", " "), pretty_exceptions_enable=False)
studies.register(app)
machine.register(app)
deployment.register(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"sfvi {version('sfvi')}")
        raise typer.Exit


@app.callback()
def main_options(
    _: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Hierarchical Bayesian models over data that may not be pooled."""


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
        module = (error.name or "").split(".")[0]
        if module not in EXTRAS:
            raise
        print(f"This needs {error.name}; pip install 'sfvi[{EXTRAS[module]}]'.", file=sys.stderr)
        sys.exit(1)
