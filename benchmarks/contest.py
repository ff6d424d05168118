"""How a comparison of steps is run: measured, printed and written; peak memory in processes of its own."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from sfvi.bench.contestants import Contestant
from sfvi.bench.step import Effort

from .scaling import PROJECT, peak_memory

QUICK = Effort(repetitions=1, steps=2)


def memory(module: str, *case: Any) -> int:
    """Peak bytes of a process of its own that makes two repetitions of a case; `module` calls `main`."""
    command = [sys.executable, "-m", module, "--memory", json.dumps(case)]
    done = subprocess.run(command, cwd=PROJECT, check=True, stdout=subprocess.PIPE, text=True)
    return int(done.stdout)


def memory_here(contestant: Contestant) -> int:
    """The same, of this process."""
    state, _ = contestant.run(contestant.state)
    jax.block_until_ready(contestant.run(state))
    return peak_memory()


def main(
    module: str,
    about: str,
    output: str,
    document: Callable[[Effort], str],
    make: Callable[..., Contestant],
    full: Effort,
) -> None:
    """Parse, measure, print, write.

    Args:
        module: What is run by `python -m`.
        about: What it does.
        output: The file, beside the benchmarks.
        document: Measures, and makes the text.
        make: A contestant from a case, for `memory`.
        full: How much is done without `--quick`.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    parser.add_argument("--quick", action="store_true", help="a miniature that writes nothing")
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        print(memory_here(make(*json.loads(options.memory))))
        return
    text = document(QUICK if options.quick else full)
    print(text)
    if not options.quick:
        (Path(__file__).parent / output).write_text(text)
