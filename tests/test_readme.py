"""The README's example runs as printed."""

import re
from pathlib import Path


def test_the_example_runs(float32, capsys):
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", readme, re.DOTALL)[1]
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "beta[0]" in printed
    assert "omega" in printed
    assert "b[299]" in printed
