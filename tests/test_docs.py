"""Code in the README and the guide runs as printed; the guide's long runs with a tenth of the rounds."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_blocks(document, namespace, *, shorter=False):
    for code in re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL):
        if shorter:
            code = re.sub(r"num_rounds=(\d{2,})0\b", r"num_rounds=\1", code)
        exec(compile(code, document, "exec"), namespace)


def test_the_example_of_the_readme(float32, capsys):
    run_blocks("README.md", {})
    printed = capsys.readouterr().out
    assert "beta[0]" in printed
    assert "omega" in printed
    assert "b[299]" in printed


def test_the_guide(float32, capsys):
    namespace = {}
    run_blocks("docs/guide.md", namespace, shorter=True)
    printed = capsys.readouterr().out
    for expected in ("<Fit: 4 silos, 200 rounds, bound with 10 draws", "tau", "bias", "effect[p0]"):
        assert expected in printed
