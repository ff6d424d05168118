"""Reports: complete by themselves, nothing local in the server's, everything escaped."""

import dataclasses
import re
import shutil
import subprocess
from html.parser import HTMLParser

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest

import sfvi
from sfvi import archive, provenance
from sfvi.diagnostics import Diagnosis
from sfvi.diagnostics.rounds import check_rounds
from sfvi.model.graph import ModelGraph
from sfvi.provenance import Sent
from sfvi.report.disclosure import meaning
from sfvi.report.graph import _covers, drawing
from sfvi.report.html import number, table
from sfvi.report.layout import lay_out
from sfvi.report.marginals import share
from sfvi.report.pictures import _labels, participation

EVIL = "<script>alert('1')</script> & \"q\" $x_1$"
NORTH = 89  # patients
VOID = {"meta", "br", "hr"}


def population():
    mu = numpyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = numpyro.sample(EVIL, dist.HalfNormal(1.0))
    return mu, tau, numpyro.param("noise", 0.7, constraint=dist.constraints.positive)


def clinic(globals_, data):
    mu, tau, noise = globals_
    level = numpyro.sample("level", dist.Normal(mu, 1.0))
    with numpyro.plate("patients", data["y"].shape[0]):
        b = numpyro.sample("b", dist.Normal(level, tau))
        numpyro.sample("y", dist.Normal(b, noise), obs=data["y"])


def laboratory(globals_, data):
    numpyro.sample("mean", dist.Normal(globals_[0], 0.1), obs=data["mean"])


def make_model():
    labels = {"patients": [f"PATIENT-{i}" for i in range(NORTH)]}
    return sfvi.StructuredModel(population, {"north": clinic, EVIL: clinic, "lab": laboratory}, coords=labels)


def values(n, seed):
    return {"y": 3.0 + np.random.default_rng(seed).normal(size=n)}


SILOS = {"north": values(NORTH, 0), EVIL: values(9, 1), "lab": {"mean": np.array(2.71828)}}


@pytest.fixture(scope="module")
def fit():
    algorithm = sfvi.SFVI(participation=sfvi.participation.count(2), bound=sfvi.bounds.elbo())
    return sfvi.fit(make_model(), SILOS, key=3, num_rounds=30, algorithm=algorithm)


class Page(HTMLParser):
    """What a page consists of; elements must be closed in order."""

    def __init__(self, path):
        super().__init__()
        self.text, self.ids, self.references, self.tags, self._open = [], [], [], [], []
        self.feed(path.read_text("utf-8"))
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self._open += [tag] if tag not in VOID else []
        for name, value in attrs:
            assert not name.startswith("on")
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "action", "srcset", "data"):
                self.references.append(value)
            self.references += re.findall(r"url\(([^)]*)\)", value or "")

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def check(self):
        assert len(set(self.ids)) == len(self.ids)
        assert "script" not in self.tags
        assert "link" not in self.tags
        for reference in self.references:
            assert reference.startswith("data:image/png;") or reference.lstrip("#") in self.ids


def test_the_servers_report_is_complete_and_holds_nothing_local(fit, tmp_path):
    fit.save(tmp_path / "fit")
    loaded = sfvi.load(tmp_path / "fit", make_model(), {})
    loaded.report(tmp_path / "loaded.html")
    fit.report(tmp_path / "own.html", diagnosis=False)
    for path in (tmp_path / "own.html", tmp_path / "loaded.html"):
        page, source = Page(path), path.read_text("utf-8")
        page.check()
        assert "http" not in re.sub(r'http-equiv="[^"]*"', "", source)
        assert "@import" not in source
        text = "".join(page.text)
        for words in (
            "Posterior of mu",
            "patients",
            "level",
            "30 rounds",
            "count(2)",
            "gradient.theta.noise",
            "float64",
        ):
            assert words in text
        assert EVIL in text
        assert "PATIENT" not in text
        for silo in SILOS.values():
            for value in np.ravel(next(iter(silo.values()))):
                assert f"{value:.3f}" not in text
        for name in ("b", "level"):
            means = np.ravel(np.mean(fit.silo("north").sample(0, 100)[name], 0))
            there = [f"{mean:.4f}" in text for mean in means]
            assert sum(there) <= 1 < len(there) or not any(
                there
            )  # one number may be there by chance, a table of them not
        assert not re.search(rf"(?<![\d.,]){NORTH}(?![\d.,%])", text)
    assert "Not diagnosed" in (tmp_path / "own.html").read_text("utf-8")
    assert "as far as" in "".join(Page(tmp_path / "loaded.html").text) or loaded.diagnose().trust != "fine"


def test_a_silos_report_has_its_units_and_says_that_it_stays(fit, tmp_path):
    fit.silo("north").report(tmp_path / "north.html", diagnosis=False)
    page = Page(tmp_path / "north.html")
    page.check()
    text = "".join(page.text)
    assert "Stays in this silo" in text
    assert "the 30 lowest and the 30 highest; the 29 between them are left out." in text
    means = np.asarray(fit.silo("north").sample(0, 2000)["b"]).mean(0)
    order = np.argsort(means)
    assert all(f"b[PATIENT-{i}]" in text for i in (order[0], order[-1]))
    assert f"b[PATIENT-{order[NORTH // 2]}]" not in text
    assert "was not given for this report" in text
    assert number(SILOS["north"]["y"].max()) in text
    fit.silo("lab").report(tmp_path / "lab.html", diagnosis=False)
    assert "no latents of its own" in "".join(Page(tmp_path / "lab.html").text)


def test_a_silos_diagnosis_is_shown_there_and_refused_at_the_server(fit, tmp_path):
    found = fit.silo(EVIL).diagnose(num_samples=20)
    server = Diagnosis((check_rounds(fit.elbo, fit.path, None),), ("importance: left out.",))
    fit.silo(EVIL).report(tmp_path / "silo.html", diagnosis=found, global_diagnosis=server)
    page = Page(tmp_path / "silo.html")
    page.check()
    text = "".join(page.text)
    assert all(check.name in text for check in found.checks)
    assert f"The global posterior: {server.trust}" in text
    assert "importance: left out." in text
    with pytest.raises(sfvi.OptionError, match="of a silo, which stays there"):
        fit.silo(EVIL).report(tmp_path / "other.html", diagnosis=False, global_diagnosis=found)
    with pytest.raises(sfvi.OptionError, match="of a silo, which stays there"):
        fit.report(tmp_path / "server.html", diagnosis=found)
    with pytest.raises(sfvi.OptionError, match=r"give what fit\.diagnose\(\) returned"):
        fit.report(tmp_path / "server.html", diagnosis="fine")
    with pytest.raises(sfvi.OptionError, match="is a folder"):
        fit.report(tmp_path, diagnosis=False)
    assert not (tmp_path / "server.html").exists()


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium on this machine")
def test_a_browser_shows_it_without_complaint(fit, tmp_path):
    fit.report(tmp_path / "server.html", diagnosis=False)
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    command += ["--no-first-run", f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr"]
    picture = tmp_path / "server.png"
    command += ["--window-size=390,2000", f"--screenshot={picture}", (tmp_path / "server.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "CONSOLE" not in done.stderr  # an error of the page, or a request that its policy refuses
    assert picture.stat().st_size > 20_000


def test_the_graph_says_what_depends_on_what(fit, tmp_path):
    assert {n.name: n.parents for n in fit.graph.population} == {"mu": (), EVIL: (), "noise": ()}
    clinics, lab = sorted(fit.graph.programs, key=lambda program: len(program.nodes), reverse=True)
    assert set(clinics.silos) == {"north", EVIL}
    found = {n.name: (n.kind, n.plates, set(n.parents), n.shape) for n in clinics.nodes}
    assert found == {
        "level": ("latent", (), {"mu"}, None),
        "b": ("latent", ("patients",), {"level", EVIL}, None),
        "y": ("observed", ("patients",), {"b", "noise"}, None),
    }
    assert [(n.name, n.parents) for n in lab.nodes] == [("mean", ("mu",))]
    assert ModelGraph.from_json(fit.graph.to_json()) == fit.graph
    picture = lay_out(fit.graph, ["one", "two"])
    for a in picture.sites:
        box = next(box for box in picture.boxes if box.kind == ("server" if a.id[0] == 0 else "silo"))
        assert a.y > box.y
        for b in picture.sites:
            if a is not b:
                assert abs(a.x - b.x) >= (a.width + b.width) / 2 or abs(a.y - b.y) >= (a.height + b.height) / 2
    places = {site.id: site.y for site in picture.sites}
    assert all(places[start] < places[end] for start, end in picture.edges)


def test_provenance_is_kept_on_file_and_may_be_missing(fit, tmp_path):
    known = fit.provenance
    assert (known.engine, known.algorithm, known.key, known.given) == (
        "in process",
        "SFVI",
        "3",
        ("bound", "participation"),
    )
    assert known.precision == "float64"
    assert known.versions["sfvi"] == provenance.versions()["sfvi"]
    fit.save(tmp_path)
    assert sfvi.load(tmp_path, make_model(), {}).provenance == known
    arrays, header = archive.read(tmp_path / "fit.npz", kind="fit")
    for name in ("provenance", "graph"):
        del header[name]
    archive.write(tmp_path / "fit.npz", arrays, header)
    old = sfvi.load(tmp_path, make_model(), {})
    assert old.provenance is None
    assert old.graph.programs == ()
    old.trace["elbo"][:] = np.nan
    old.report(tmp_path / "old.html", diagnosis=False)
    text = "".join(Page(tmp_path / "old.html").text)
    assert "they are not known" in text
    assert "silo programs are not drawn" in text
    assert "kept their terms" in text


@pytest.mark.parametrize(
    "options",
    [
        sfvi.SFVI(),
        sfvi.SFVI(global_family=sfvi.families.low_rank(rank=1)),
        sfvi.SFVI(global_family=sfvi.families.flow()),
        sfvi.SFVI(bound=sfvi.bounds.importance_weighted(2)),
        sfvi.SFVI(fixed_noise=sfvi.FixedNoise()),
        sfvi.SFVIAvg(num_local_steps=1),
        sfvi.Sites(),
    ],
    ids=lambda options: type(options).__name__,
)
def test_every_part_of_every_reply_is_explained(options):
    model = make_model()
    algorithm = dataclasses.replace(options, bound=options.bound or sfvi.bounds.elbo()).bind(model)
    theta, units = {"noise": jnp.zeros(())}, jnp.ones(2)

    def silent(key):
        return algorithm.silent(algorithm.broadcast(key, algorithm.server_init(key, theta, units)))

    sent = Sent.of(algorithm, eqx.filter_eval_shape(silent, jax.random.key(0)))
    assert sent.parts
    for part in sent.parts:
        assert meaning(sent.algorithm, part.path), (sent.algorithm, part.path)


def test_edges_keep_off_labels_and_tables_have_no_empty_lines(fit):
    picture = lay_out(fit.graph, ["one", "two"])
    paths = re.findall(r'd="M([\d.,-]+) Q([\d.,-]+) ([\d.,-]+)"', drawing(fit.graph))
    assert paths
    for path in paths:
        curve = [np.array([float(part) for part in point.split(",")]) for point in path]
        for t in np.linspace(0, 1, 50):
            point = (1 - t) ** 2 * curve[0] + 2 * t * (1 - t) * curve[1] + t**2 * curve[2]
            assert not any(box.kind == "plate" and _covers(box, point, 0.0) for box in picture.boxes)
    made = table(["", "a", "b"], [["one", "1", "–"], ["two", "–", "–"]], caption="", numbers=[1, 2])
    assert "two" not in made
    assert '<th scope="col" class="number">b</th>' not in made
    assert _labels(["ward-17/patient-1", "ward-17/patient-2"], 14) == ["…1", "…2"]
    named = participation(pd.DataFrame(np.eye(3), columns=[f"university-hospital-of-nowhere-{j}" for j in range(3)]))
    assert all(named.count(f">…{j}<") == 2 for j in range(3))  # at both widths
    made = table(["", "shape", "words"], [["a", "3 × 4", "so many words that they need some room"]], caption="")
    assert '<td class="short">3 × 4</td>' in made
    assert '<td class="long">so' in table(
        ["", ""], [["a", "so many words that they need more room in a line"]], caption=""
    )


def test_tables_share_their_lines_among_sites():
    assert share({"w": 50_000, "sigma": 1, "b": 3}, 30) == {"w": 26, "sigma": 1, "b": 3}
    assert sum(share({str(i): 5 for i in range(40)}, 30).values()) == 30
    assert share({}, 30) == {}
    assert [number(v, 0.0839, digits=2) for v in (-0.2066, 12.0)] == ["−0.207", "12.000"]
    assert [number(v) for v in (0, np.nan, 1234567.8, 1e-9)] == ["0.00", "–", "1,234,568", "1e−09"]
