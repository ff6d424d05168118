"""Code in README, pages and tutorial runs as printed; long runs of the pages with a tenth of the rounds and steps."""

import importlib
import re
import sys
from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

import sfvi

ROOT = Path(__file__).parents[1]
LONG = ("sfvi.FixedNoise(", "families.flow(")  # blocks that take as long as all others, to compile
BLOCK = re.compile(r'```python(?: title="(.*?)")?\n(.*?)```', re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
MODULES = ("bounds", "data", "families", "zoo", "formula", "algorithms", "baselines", "deploy", "diagnostics")


def blocks(document):
    return [code for name, code in BLOCK.findall((ROOT / document).read_text()) if not name]


def shorter(code):
    return re.sub(r"(num_rounds|num_local_steps|num_draws)=(\d{2,})0\b", r"\1=\2", code)


def run(codes, document):
    namespace = {}
    for code in codes:
        exec(compile(code, document, "exec"), namespace)


def test_the_example_of_the_readme(float32, capsys, monkeypatch):
    monkeypatch.setattr(sfvi.SFVI, "usual_rounds", 1000)  # a tenth
    run(blocks("README.md"), "README.md")
    printed = capsys.readouterr().out
    assert "beta[0]" in printed
    assert "omega" in printed
    assert "b[299]" in printed


PAGES = {
    "start": ("<Fit: 2 silos, 300 rounds, bound with 10 draws", "frailty[0]", "Sites      12", "'effect', 'intercept'"),
    "guide": ("<Fit: 2 silos, 200 rounds, bound with 10 draws", "tau", "bias", "effect[p0]", "Sites       3"),
    "zoo": ("(60, 3)",),
    "topics": ("30 31 (100, 10)", "orbit", "diversity", "perplexity"),
    "privacy": ("the server reads x = 1.70, y = -0.40", "computed by many"),
    "extending/family": ("and it is 4", "<GlobalPosterior of beta, tau: StudentT>"),
    "extending/algorithm": ("<Fit: 2 silos, 300 rounds, ELBO",),
    "glmm": (
        "rows left out because of missing values: 1 in hungarian, 2 in switzerland, 57 in va",
        "T(chest_pain, 'none')[typical]",
        "odds ratio",
        "switzerland 1",
        "HalfNormal(1)",
        '"levels": {"chest_pain": ["atypical", "none", "other", "typical"]}',
    ),
}


@pytest.mark.parametrize("page", PAGES)
def test_a_page(page, float32, capsys):
    document = f"docs/{page}.md"
    run([shorter(code) for code in blocks(document) if not any(long in code for long in LONG)], document)
    printed = capsys.readouterr().out
    for expected in PAGES[page]:
        assert expected in printed


def test_the_long_blocks_of_the_guide(float32, capsys):
    first, second, *others = blocks("docs/guide.md")
    chosen = [first, second, *(code for code in others if any(long in code for long in LONG))]
    run([shorter(code) for code in chosen], "docs/guide.md")
    assert "bias of mean, in sds" in capsys.readouterr().out


def test_answers_to_mistakes_are_those_printed(float32, capsys):
    document = "docs/from_numpyro.md"
    run([shorter(code) for code in blocks(document)], document)
    printed = capsys.readouterr().out
    answers = re.findall(r"```text\n(.*?)\n```", (ROOT / document).read_text(), re.DOTALL)
    assert len(answers) == 6
    for answer in answers:
        assert answer in printed


def test_spoiled_fits_are_found_out(float32, capsys):
    run(blocks("docs/diagnostics.md"), "docs/diagnostics.md")  # its rounds are short, and their number matters
    printed = capsys.readouterr().out
    assert "['b.html', 'server.html']" in printed
    levels = re.findall(r"^(Fine|Doubtful|Do not trust)\.$", printed, re.MULTILINE)
    assert len(levels) == 5
    assert levels[0] == "Fine"
    assert "Fine" not in levels[1:]


def test_an_engine_over_a_folder(tmp_path, monkeypatch, capsys):
    document = "docs/extending/engine.md"
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, code in BLOCK.findall((ROOT / document).read_text()):
        if name:
            (tmp_path / name).write_text(code)
    run(blocks(document), document)
    sys.modules.pop("shared_folder")
    assert "posterior.npz" in capsys.readouterr().out


def printed_by(cell):
    """What a cell of a notebook prints, its words and its numbers apart, and how many pictures it shows."""
    text = "".join(output["text"] for output in cell.outputs if output.output_type == "stream")
    pictures = sum("image/png" in output.get("data", {}) for output in cell.outputs)
    return NUMBER.sub("#", text).split(), [float(number) for number in NUMBER.findall(text)], pictures


def test_the_tutorial(tmp_path, monkeypatch):
    """As printed: the same words and pictures, numbers up to what another processor or sampler path makes of them."""
    monkeypatch.setenv("JAX_ENABLE_X64", "0")
    notebook = nbformat.read(ROOT / "docs" / "tutorial.ipynb", as_version=4)
    kept = [printed_by(cell) for cell in notebook.cells if cell.cell_type == "code"]
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    found = [printed_by(cell) for cell in notebook.cells if cell.cell_type == "code"]
    for (words, numbers, pictures), (same_words, same_numbers, same_pictures) in zip(found, kept, strict=True):
        assert words == same_words
        assert pictures == same_pictures
        np.testing.assert_allclose(numbers, same_numbers, rtol=0.1, atol=0.03)


def documented():
    """Names that the reference shows, those of whole modules too."""
    names = set()
    for page in (ROOT / "docs" / "api").glob("*.md"):
        names |= set(re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE))
    return names


def public():
    """All names of `__all__`, but for modules whose own names are listed."""
    for module in ("sfvi", *(f"sfvi.{name}" for name in MODULES)):
        for name in getattr(importlib.import_module(module), "__all__", ()):
            if name not in MODULES:
                yield module, name


def test_the_reference_is_complete():
    shown = documented()
    at_top = {name.removeprefix("sfvi.") for name in shown}  # sfvi.SFVI is sfvi.algorithms.SFVI too
    missing = [
        f"{m}.{n}" for m, n in public() if not {m, f"{m}.{n}"} & shown and not (n in sfvi.__all__ and n in at_top)
    ]
    assert missing == []
