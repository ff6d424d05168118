"""Fits by command: the same digits as in Python, kept whole or not at all, read again for reports."""

import json
import shutil
import sys
from html import unescape

import pandas as pd
import pytest
from typer.testing import CliRunner

import sfvi
from sfvi import archive
from sfvi.cli import app
from sfvi.engines.progress import ProgressBar
from sfvi.errors import SfviError
from sfvi.studies import keeping

from . import small

HERE = small.__name__
SILOS = ["--silo", f"north={HERE}:load", "--silo", "south=south.csv"]
FIT = ["fit", "--model", f"{HERE}:model", *SILOS, "--algorithm", f"{HERE}:options", "--precision", "float64"]
FIT += ["--rounds", "60"]


def sfvi_command(*arguments, code=0):
    result = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder to work in, with the southern silo's table."""
    folder = tmp_path_factory.mktemp("cli")
    rows = pd.DataFrame({"y": small.Y[12:], "x": small.Y[12:] ** 2, "g": ["p", "q", "r"] * 6})
    rows[["y"]].to_csv(folder / "south.csv", index=False)
    rows.to_csv(folder / "rows.csv", index=False)
    return folder


@pytest.fixture(autouse=True)
def there(home, monkeypatch):
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture(scope="module")
def fitted():
    """The same fit in Python."""
    silos = {name: small.load(name) for name in ("north", "south")}
    return sfvi.fit(small.model, silos, key=0, num_rounds=60, algorithm=small.options)


@pytest.fixture(scope="module")
def kept(home):
    """A fit by command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        return json.loads(sfvi_command(*FIT, "--output", "kept", "--json").stdout)


def test_a_fit_by_command_is_that_of_python(kept, fitted, home):
    again = sfvi.load(home / "kept", small.model, {"north": small.load("north")})
    assert again.elbo.tolist() == fitted.elbo.tolist()
    assert kept["summary"]["mu"] == fitted.posterior.summary().loc["mu"].to_dict()
    assert {name: kept[name] for name in ("folder", "algorithm", "rounds", "converged", "verdicts")} == {
        "folder": "kept",
        "algorithm": "SFVI",
        "rounds": 60,
        "converged": None,
        "verdicts": [],
    }
    assert not list(home.glob(".*part"))


def test_after_an_interruption_the_same_command_goes_on(fitted, home, monkeypatch):
    command = [*FIT, "--output", "again", "--checkpoint", "again/run.npz"]

    def stop(bar, progress):
        if progress.round >= 10:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ProgressBar, "update", stop)
        begun, said = sfvi_command(*command, code=130).stderr.splitlines()
        assert begun == "Fitting 2 silos, 60 rounds; this may take minutes."
        assert said == "Interrupted; the same command goes on."
    assert [path.name for path in (home / "again").iterdir()] == ["run.npz"]
    said = sfvi_command(*command).stdout
    assert said.endswith(f"  sfvi report again --silo north={HERE}:load --silo south=south.csv\n")
    assert "not known yet: diagnose finds out" in said
    assert "\nmu  " in said
    assert sfvi.load(home / "again", small.model, {}).elbo.tolist() == fitted.elbo.tolist()
    assert "'again' held the result of the same command already" in sfvi_command(*command).stderr


def test_how_far_to_trust_it_and_its_reports(kept, home):
    assert "not here" in sfvi_command("diagnose", "kept", code=3).stdout
    said = sfvi_command("report", "kept", "--silo", "south=south.csv", "--output", "out.html").stdout
    assert said.startswith("The report is in out.html.\nThe report is in out-south.html.\nThe diagnosis was made now")
    assert all("<html" in (home / name).read_text() for name in ("out.html", "out-south.html"))
    assert "The global posterior: " in (home / "out-south.html").read_text()
    result = CliRunner().invoke(app, ["diagnose", "kept/silos/south.npz", "--silo", "south=south.csv", "--json"])
    found = json.loads(result.stdout)
    assert found["fit"] is None
    assert [check["name"] for check in found["silos"]["south"]["checks"]] == ["units", "predictive"]
    assert result.exit_code == (0 if found["trust"] == "fine" else 3)
    units, predictive = found["silos"]["south"]["checks"]
    assert {len(units["table"]), units["table"][-1]["unit"] + 1} == {18}
    assert predictive["table"][0]["site"] == "y"


def test_a_diagnosis_is_kept_beside_the_fit_that_it_is_of(kept, home, fitted, monkeypatch):
    result = CliRunner().invoke(app, ["diagnose", "kept", *SILOS, "--json"])
    found = json.loads(result.stdout)["fit"]
    assert [row["coordinate"] for row in found["checks"][1]["steps"]] == ["mu"]
    sfvi_command("diagnose", "kept", code=3)  # with less: what was found with all silos stays
    with monkeypatch.context() as patch:
        patch.setattr(sfvi.Fit, "diagnose", None)
        made = json.loads(sfvi_command("report", "kept", "--json").stdout)
        assert made == {"reports": ["kept/report.html"], "diagnosis": "kept/diagnosis.json"}
        assert found["checks"][2]["verdict"].partition(": ")[2][8:] in unescape((home / "kept/report.html").read_text())
        sfvi_command("report", "kept", "--no-diagnosis")
        assert "Not diagnosed" in (home / "kept/report.html").read_text()
        again = keeping.find(home / "kept", fitted.posterior, ["north"]).diagnosis["importance"]
    assert again.summary(num_samples=50).loc["mu", "mean"] == pytest.approx(1.0, abs=1.0)
    assert keeping.find(home / "kept", fitted.posterior, ["east"]) is None
    (home / "other").mkdir()
    for name in ("global.npz", "diagnosis.json"):
        shutil.copy(home / "kept" / name, home / "other" / name)
    arrays, header = archive.read(home / "kept" / "fit.npz", kind="fit")
    archive.write(home / "other" / "fit.npz", {**arrays, "trace.elbo": arrays["trace.elbo"] + 1.0}, header)
    assert keeping.find(home / "other", fitted.posterior, []) is None


def test_columns_of_text_are_no_matter_unless_they_are_asked_for(home):
    command = ["fit", "--model", f"{HERE}:model", "--rounds", 2, "--silo", "south=rows.csv", "--output", "text"]
    found = json.loads(sfvi_command(*command, "--json").stdout)
    assert found["notes"] == ["Silo south: columns of text, which the program does not see: g"]
    with pytest.raises(SfviError, match="Silo 'b': the program asks for column 'g', which holds text; turn it into"):
        sfvi.StructuredModel(small.population, lambda mu, data: data["g"]).silo_data("b", pd.read_csv("rows.csv"))


def test_a_formula_leaves_what_its_report_needs(home, float32):
    command = ["fit", "--formula", "y ~ x + (1 | silo)", "--family", "gaussian", "--rounds", 5, "--output", "formula"]
    found = json.loads(sfvi_command(*command, "--silo", "a=rows.csv", "--silo", "b=rows.csv", "--json").stdout)
    assert set(found["summary"]) == {"Intercept", "x", "sd(1|silo)", "sigma"}
    assert set(found["silos"]) == {"a, 1", "b, 1"}
    assert "36 rows in 2 silos" in found["notes"][0]
    made = json.loads(sfvi_command("report", "formula", "--silo", "a=rows.csv", "--json").stdout)["reports"]
    assert made == ["formula/report.html", "formula/report-a.html"]
    text = (home / "formula" / "report.html").read_text()
    assert "<code>x</code>" in text
    assert "beta" not in text


MODEL = ["--model", f"{HERE}:model"]
FORMULA = ["--formula", "y ~ x", "--family", "gaussian"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["fit", *SILOS], "either --model module:object or --formula"),
        (["fit", *MODEL, *FORMULA, *SILOS], "either --model module:object or --formula"),
        (["fit", "--formula", "y ~ x", *SILOS], "--formula needs --family"),
        (["fit", *MODEL, "--family", "poisson", *SILOS], "--family goes with --formula"),
        (["fit", *MODEL, "--missing", "drop", *SILOS], "--missing and --no-standardize go with --formula"),
        (["fit", *FORMULA, "--unit-ids", "g", *SILOS], "--unit-ids goes with --model"),
        (["fit", *FORMULA, *SILOS], "Silo 'north' has a dict; with a formula give"),
        (["fit", *MODEL], "--silo NAME=FILE for each silo"),
        (["fit", *MODEL, "--silo", "north"], "--silo 'north': write NAME=FILE"),
        (["fit", *MODEL, *SILOS, *SILOS], "--silo 'north' is given twice"),
        (["fit", *MODEL, "--silo", "a=nix.csv"], "Silo 'a': there is no file 'nix.csv'"),
        (["fit", *MODEL, "--silo", f"a={HERE}:nothing"], "RuntimeError: the disk is gone"),
        (["fit", "--model", "nix:x", *SILOS], "the module 'nix' cannot be imported"),
        (["fit", *MODEL, *SILOS, "--precision", "float16"], "choose float32 or float64"),
        (["fit", *MODEL, *SILOS, "--algorithm", "SGD"], "algorithm is 'SGD'"),
        (["fit", *MODEL, *SILOS, "--option", "nix=1"], "SFVI has no option 'nix'"),
        (["fit", *MODEL, *SILOS, "--option", "nix"], "--option 'nix': write name=value"),
        (["fit", *MODEL, *SILOS, "--unit-ids", "id"], "no column 'id' for unit_ids"),
        (["fit", *MODEL, *SILOS, "--output", "south.csv"], "'south.csv' is a file; name a folder"),
        (["fit", *MODEL, *SILOS, "--output", "full"], "'full' holds something else already"),
        (["fit", *MODEL, *SILOS, "--output", "kept"], "'kept' holds another fit"),
        (["report", "nix"], "There is no 'nix'; name a folder"),
        (["report", "full"], "'full' does not say which model made it; give --model"),
        (["report", "kept", "--silo", "east=south.csv"], "--silo east: the fit in 'kept' is of north, south"),
        (["diagnose", "kept/silos/south.npz"], "is one silo's file; give that silo's data"),
        (["diagnose", "kept", "--silo", "north=south.csv"], "with another silo program or other data shapes"),
    ],
)
def test_mistakes_are_one_sentence(kept, home, command, said):
    (home / "full").mkdir(exist_ok=True)
    (home / "full" / "letter.txt").touch()
    before = {path: path.stat().st_mtime_ns for path in home.rglob("*")}
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, SfviError)
    assert said in str(result.exception)
    assert "\n" not in str(result.exception)
    assert {path: path.stat().st_mtime_ns for path in home.rglob("*")} == before
