"""The command line, in miniature."""

from typer.testing import CliRunner

from sfvi.cli import app


def test_demo_prints_the_table_and_draws_the_picture(tmp_path, float32):
    sizes = ["--rounds", "50", "--sites-rounds", "1", "--draws", "100"]
    result = CliRunner().invoke(app, ["demo", "--output", str(tmp_path), *sizes])
    assert result.exit_code == 0, result.output
    for expected in (
        "NUTS, pooled",
        "SFVI, two silos",
        "Sites, two silos",
        "NUTS, north",
        "NUTS, south",
        "omega",
        "beta[smoke:age]",
    ):
        assert expected in result.output
    assert (tmp_path / "six_cities.png").stat().st_size > 10_000


def test_without_a_command_it_explains_itself():
    result = CliRunner().invoke(app, [])
    assert "demo" in result.output
    assert CliRunner().invoke(app, ["demo", "--rounds", "0"]).exit_code != 0
