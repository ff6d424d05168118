"""Measure, print, and write RESULTS.md with its pictures."""

import argparse
from pathlib import Path
from typing import NamedTuple

from sfvi.bench import step
from sfvi.bench.step import Effort

from . import report, scaling
from .scaling import Case

HERE = Path(__file__).resolve().parent


class Plan(NamedTuple):
    """What is measured.

    Attributes:
        effort: Of the comparison of steps.
        by_silos: Cases with the same data over ever more silos.
        by_rows: Cases with ever more data over the same silos.
        passes: Times that every case is run.
    """

    effort: Effort
    by_silos: tuple[Case, ...]
    by_rows: tuple[Case, ...]
    passes: int


FULL = Plan(
    effort=Effort(repetitions=15, steps=2000),
    by_silos=(
        *(Case(num_silos, 40_000) for num_silos in (1, 10, 100, 1000)),
        Case(1000, 40_000, ragged=True),
        Case(1000, 40_000, ragged=True, merge=False),
    ),
    by_rows=tuple(Case(10, rows) for rows in (1000, 10_000, 100_000, 1_000_000)),
    passes=2,
)
QUICK = Plan(
    effort=Effort(repetitions=2, steps=100),
    by_silos=tuple(Case(num_silos, 400, seconds=0.1) for num_silos in (1, 2)),
    by_rows=tuple(Case(2, rows, seconds=0.1) for rows in (400, 4000)),
    passes=1,
)


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a miniature, to see that everything runs")
    parser.add_argument("--output", type=Path, help="folder to write to; by default benchmarks/, with --quick none")
    options = parser.parse_args()
    output = options.output or (None if options.quick else HERE)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
    document = Document()
    agree = measure(QUICK if options.quick else FULL, document, output)
    if output is not None:
        (output / "RESULTS.md").write_text(document.text())
    if not agree and not options.quick:
        raise SystemExit("The contestants did not end at the same ELBO: the comparison is void.")


class Document:
    """Markdown that is printed while it grows."""

    def __init__(self):
        self._parts: list[str] = []

    def add(self, part: str) -> None:
        """Print and keep a block."""
        print(part, end="\n\n", flush=True)
        self._parts.append(part)

    def text(self) -> str:
        """Return all of it."""
        return "\n\n".join(self._parts) + "\n"


def measure(plan: Plan, document: Document, output: Path | None) -> bool:
    """Fill the document and draw the pictures; tell whether the contestants agree."""
    document.add("# Benchmarks")
    document.add(f"Made by `make bench` on: {report.machine()}. Ratios carry over to other machines, seconds do not.")
    document.add(report.introduction(plan.effort))
    comparisons = step.compare(plan.effort)
    for comparison in comparisons:
        document.add(f"## A step: six cities over {comparison.num_silos} silos")
        document.add(report.step_table(comparison))
        document.add(report.verdict(comparison))
    document.add("## Growth")
    document.add(report.scaling_introduction(plan.passes))
    costs = scaling.measure([*plan.by_silos, *plan.by_rows], passes=plan.passes)
    for title, name, over, cases in (
        ("### More silos, same data", "scaling_silos.png", "num_silos", plan.by_silos),
        ("### More rows, same silos", "scaling_rows.png", "rows", plan.by_rows),
    ):
        chosen = {case: costs[case] for case in cases}
        document.add(title)
        document.add(report.scaling_table(chosen, over=over))
        if output is not None:
            report.plot(output / name, chosen, over=over)
            document.add(f"![{title.strip('# ')}]({name})")
    return all(comparison.agree() for comparison in comparisons)


if __name__ == "__main__":
    main()
