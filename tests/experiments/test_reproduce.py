"""Cells on file, settings, and READMEs: with an experiment that takes no time, and killed ones."""

import dataclasses
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

import sfvi
from sfvi.cli import app
from sfvi.experiments import EXPERIMENTS, reproduce, spec
from sfvi.experiments.base import Cell, markdown
from sfvi.experiments.reproduce import filled
from sfvi.experiments.store import Store

ROOT = Path(__file__).parents[2]
RUNS: list[str] = []


@dataclasses.dataclass(frozen=True)
class Squares:
    numbers: tuple[int, ...]
    power: int

    def cells(self):
        def run(number, state):
            RUNS.append(f"{number}")
            state.write_text("begun")
            if number == 13:
                raise RuntimeError("bad luck")
            return {"value": number**self.power}

        return [Cell(f"number {n}", {"power": self.power}, lambda state, n=n: run(n, state)) for n in self.numbers]

    def report(self, results):
        return markdown(["number", "value"], [[name, str(found["value"])] for name, found in results.items()])

    def draw(self, results, path):
        path.write_text(f"{len(results)}")


KINDS = {"squares": Squares}


@pytest.fixture
def folder(tmp_path):
    home = tmp_path / "squares"
    home.mkdir()
    write(home, [1, 2, 3], 2)
    (home / "README.md").write_text("Squares\n<!-- small: begin -->\nold\n<!-- small: end -->\nThat is all.\n")
    RUNS.clear()
    return tmp_path


def write(home, numbers, power):
    (home / "spec.toml").write_text(f"[presets.small]\nnumbers = {numbers}\npower = {power}\n")


def run(folder, **options):
    said = []
    report = reproduce(folder, KINDS, "squares", preset="small", say=said.append, **options)
    return report, said


def states(folder):
    """Of cells that were begun."""
    return [path for path in (folder / "squares" / ".unfinished" / "small").iterdir() if path.name != "lock"]


def test_tables_go_into_the_readme_and_nothing_is_run_twice(folder):
    report, said = run(folder)
    assert RUNS == ["1", "2", "3"]
    assert len(said) == 3
    assert "[3/3] number 3" in said[2]
    expected = "| number | value |\n| --- | ---: |\n| number 1 | 1 |\n| number 2 | 4 |\n| number 3 | 9 |\n"
    assert report == expected
    readme = (folder / "squares" / "README.md").read_text()
    assert readme == f"Squares\n<!-- small: begin -->\n{expected}<!-- small: end -->\nThat is all.\n"
    assert (folder / "squares" / "small.png").read_text() == "3"
    assert run(folder) == (report, ["3 of 3 cells are known already"])
    assert RUNS == ["1", "2", "3"]
    assert states(folder) == []


def test_what_was_found_before_a_failure_is_kept(folder):
    write(folder / "squares", [2, 13, 3], 2)
    with pytest.raises(RuntimeError, match="bad luck"):
        run(folder)
    assert len(states(folder)) == 1
    write(folder / "squares", [2, 3], 2)
    report, said = run(folder)
    assert RUNS == ["2", "13", "3"]
    assert "| number 3 | 9 |" in report
    assert said[0] == "1 of 2 cells are known already"


def test_other_settings_are_run_again_and_old_cells_dropped(folder):
    run(folder)
    write(folder / "squares", [1, 3], 3)
    report, _ = run(folder)
    assert "| number 3 | 27 |" in report
    assert set(json.loads((folder / "squares" / "small.json").read_text())) == {"number 1", "number 3"}


def test_two_processes_fill_one_table(folder):
    """What another one has found meanwhile is not lost."""
    cells = Squares((1, 2, 3), 2).cells()
    one, other = Store(folder / "squares", "small"), Store(folder / "squares", "small")
    one.fill(cells[0])
    other.fill(cells[1])
    one.fill(cells[2])
    assert set(Store(folder / "squares", "small").results(cells)) == {cell.name for cell in cells}


def test_some_cells_only_and_afresh(folder):
    run(folder, only="number 2")
    assert RUNS == ["2"]
    run(folder, only="number 2", fresh=True)
    assert RUNS == ["2", "2"]
    with pytest.raises(sfvi.OptionError, match="No cell of squares holds 'nine'"):
        run(folder, only="nine")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[presets.small]\nnumbers = [1]\n", "'power' is missing"),
        ("[presets.small]\nnumbers = [1]\npower = 2\ncolour = 3\n", "'colour' is not a setting"),
        ("[presets.small]\nnumbers = 3\npower = 2\n", "numbers is 3; give a list"),
        ('[presets.small]\nnumbers = ["a"]\npower = 2\n', "numbers is 'a'; give a whole number"),
        ("[presets.small]\nnumbers = [1]\npower = 0\n", "power is 0; give a whole number of at least 1"),
        ("[presets.small]\nnumbers = [1]\npower = true\n", "power is True; give a whole number"),
        ("presets = 3\n", "has no presets"),
        ("[presets]\nsmall = 3\n", "is 3; give a table of settings"),
        ("[presets.large]\nnumbers = [1]\n", "no preset 'small'; choose one of large"),
        ("[presets.small\n", "cannot be read"),
    ],
)
def test_bad_specifications_are_said_so(folder, content, message):
    (folder / "squares" / "spec.toml").write_text(content)
    with pytest.raises(sfvi.OptionError, match=message):
        run(folder)
    assert not RUNS


CITIES = {
    "splits": ["2 silos, 300 and 237"],
    "seeds": [0],
    "pooled_draws": 50,
    "silo_draws": 30,
    "rounds": 60,
    "average": {"rounds": 2, "steps": 10},
    "sites": {"rounds": 2, "steps": 10},
}
DIGITS = {
    "seeds": [0],
    "splits": [{"silos": 2, "rows": 40, "batch": 20}],
    "steps": 20,
    "independent_steps": 20,
    "local_steps": 10,
    "step_size": 0.01,
    "variant_rounds": 2,
    "variant_steps": 5,
    "variants": [{"name": "a"}],
}
BAD_SETTINGS = {
    "six_cities": (
        CITIES,
        [
            ({"splits": ["nine silos"]}, "no split 'nine silos'"),
            ({"seeds": [0, 0]}, "each once"),
            ({"seeds": []}, "at least one"),
            ({"average": {"rounds": 2}}, "average: 'steps' is missing"),
            ({"average": {"rounds": 2, "steps": 1, "x": 1}}, "average: 'x' is not a setting"),
            ({"sites": 5}, "sites is 5; give a table"),
        ],
    ),
    "multinomial": (
        DIGITS,
        [
            ({"splits": []}, "at least one split"),
            ({"splits": [{"silos": 400, "rows": 200, "batch": 2}]}, "more than 60,000 images"),
            ({"splits": [{"silos": 2, "rows": 200}]}, "splits: 'batch' is missing"),
            ({"local_steps": 3}, "no whole rounds"),
            ({"step_size": -1.0}, "step_size is -1.0; give a positive number"),
            ({"variants": [{"name": "a"}, {"name": "a"}]}, "the same name"),
            ({"variants": [{"name": "a", "method": "SGD"}]}, "method is 'SGD'; choose one of SFVI-Avg, SFVI"),
            ({"variants": [{"name": "a", "scales": -1.0}]}, "scales is -1.0"),
            ({"variants": [{"name": "a", "factor": False, "method": "SFVI"}]}, "factor = false is for SFVI-Avg"),
            ({"variants": [{"method": "SFVI"}]}, "variants: 'name' is missing"),
        ],
    ),
}
CASES = [(kind, base | change, message) for kind, (base, cases) in BAD_SETTINGS.items() for change, message in cases]


@pytest.mark.parametrize(("kind", "settings", "message"), CASES, ids=[message for *_, message in CASES])
def test_bad_settings_are_one_sentence_before_any_work(tmp_path, kind, settings, message):
    (tmp_path / kind).mkdir()
    lines = [f"{key} = {toml(value)}" for key, value in settings.items()]
    (tmp_path / kind / "spec.toml").write_text("\n".join(["[presets.small]", *lines]) + "\n")
    with pytest.raises(sfvi.OptionError, match=re.escape(message)):
        spec.read(tmp_path / kind, EXPERIMENTS[kind], "small")


def toml(value):
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + " }"
    return f"[{', '.join(map(toml, value))}]" if isinstance(value, list) else json.dumps(value)


def test_half_a_place_in_the_readme_is_said_before_any_work(folder):
    (folder / "squares" / "README.md").write_text("<!-- small: end -->\n<!-- small: begin -->\n")
    with pytest.raises(sfvi.OptionError, match="where the tables go"):
        run(folder)
    assert not RUNS


def test_some_cells_of_a_comparison_are_kept_without_a_table(tmp_path, cities):
    """Without what all is compared with there is nothing to show, but nothing is lost."""
    experiment = spec.read(cities / "six_cities", EXPERIMENTS["six_cities"], "tiny")
    assert "not there yet" in experiment.report({})
    experiment.draw({}, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_unknown_experiments_are_said_so(folder):
    with pytest.raises(sfvi.OptionError, match=r"no experiment 'cubes' .* there are: squares"):
        reproduce(folder, KINDS, "cubes", preset="small")


def test_damaged_results_are_not_overwritten(folder):
    run(folder)
    path = folder / "squares" / "small.json"
    path.write_text(path.read_text()[:-20])
    damaged = path.read_text()
    with pytest.raises(sfvi.ArchiveError, match="is damaged"):
        run(folder)
    assert path.read_text() == damaged


def test_a_readme_without_a_place_stays_as_it_is():
    assert filled("text", "small", "table\n") == "text"


@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_specifications_are_complete_and_tables_are_those_of_the_results(name):
    """What the README shows is what the code makes of the results beside it; all presets can be read."""
    home = ROOT / "experiments" / name
    text = (home / "README.md").read_text()
    assert f"sfvi reproduce {name} --preset paper" in text
    presets = tomllib.loads((home / "spec.toml").read_text())["presets"]
    assert {"quick", "paper"} <= set(presets)
    for preset in presets:
        experiment = spec.read(home, EXPERIMENTS[name], preset)
        cells = experiment.cells()
        assert len({cell.name for cell in cells}) == len(cells)
        if (home / f"{preset}.json").exists():
            found = Store(home, preset).results(cells)
            assert filled(text, preset, experiment.report(found)) == text


def test_every_specification_has_its_experiment():
    assert spec.names(ROOT / "experiments") == sorted(EXPERIMENTS)


MINIATURE = """
[presets.tiny]
splits = ["2 silos, 300 and 237"]
seeds = [0]
pooled_draws = 50
silo_draws = 30
rounds = 60
average = { rounds = 2, steps = 10 }
sites = { rounds = 2, steps = 10 }
"""


@pytest.fixture(scope="module")
def cities(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experiments")
    (folder / "six_cities").mkdir()
    (folder / "six_cities" / "spec.toml").write_text(MINIATURE)
    return folder


def test_six_cities_in_miniature(cities):
    """Killed in the middle by a signal that cannot be caught, then begun again."""
    command = [sys.executable, "-m", "sfvi", "reproduce", "six_cities", "--preset", "tiny", "--folder", str(cities)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "SFVI, the paper's family" in line:
            process.kill()
            break
    process.wait()
    process.stdout.close()
    known = json.loads((cities / "six_cities" / "tiny.json").read_text())
    result = CliRunner().invoke(
        app, ["reproduce", "six_cities", "--preset", "tiny", "--folder", str(cities)], catch_exceptions=False
    )
    assert result.exit_code == 0
    assert f"{len(known)} of 7 cells are known already" in result.output
    for row in ("NUTS, pooled", "NUTS, a silo alone", "two-stage", "SFVI, locally enhanced", "SFVI-Avg", "Sites"):
        assert f"| {row} |" in result.output
    assert (cities / "six_cities" / "tiny.png").stat().st_size > 10_000


def test_experiments_are_listed(cities):
    assert CliRunner().invoke(app, ["reproduce", "--folder", str(cities)]).output == "six_cities\n"
