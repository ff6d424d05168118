"""Code in the README and the guides runs as printed; long runs of the guides with a tenth of the rounds and steps."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
LONG = "sfvi.FixedNoise("  # a block that takes as long as all others, to compile


def blocks(document):
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


def shorter(code):
    return re.sub(r"(num_rounds|num_local_steps)=(\d{2,})0\b", r"\1=\2", code)


def run(codes, document):
    namespace = {}
    for code in codes:
        exec(compile(code, document, "exec"), namespace)


def test_the_example_of_the_readme(float32, capsys):
    run(blocks("README.md"), "README.md")
    printed = capsys.readouterr().out
    assert "beta[0]" in printed
    assert "omega" in printed
    assert "b[299]" in printed


def test_the_guide(float32, capsys):
    run([shorter(code) for code in blocks("docs/guide.md") if LONG not in code], "docs/guide.md")
    printed = capsys.readouterr().out
    for expected in ("<Fit: 4 silos, 200 rounds, bound with 10 draws", "tau", "bias", "effect[p0]"):
        assert expected in printed


def test_mixed_models_by_formula(float32, capsys):
    run([shorter(code) for code in blocks("docs/glmm.md")], "docs/glmm.md")
    printed = capsys.readouterr().out
    for expected in (
        "rows left out because of missing values: 1 in hungarian, 2 in switzerland, 57 in va",
        "T(chest_pain, 'none')[typical]",
        "odds ratio",
        "switzerland 1",
        "HalfNormal(1)",
        '"levels": {"chest_pain": ["atypical", "none", "other", "typical"]}',
    ):
        assert expected in printed


def test_the_guide_on_fixed_noise(float32, capsys):
    first, *others = blocks("docs/guide.md")
    run([shorter(code) for code in (first, *others) if code is first or LONG in code], "docs/guide.md")
    assert "bias of mean, in sds" in capsys.readouterr().out
