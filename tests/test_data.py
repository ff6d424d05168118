"""Data sets, shipped or downloaded, and splits."""

import csv
import gzip
import hashlib
import os
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pooch
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sfvi
from sfvi.data import images


def test_six_cities_has_its_published_margins():
    data = sfvi.data.six_cities()
    smoke = data["x"][:, 0, 1]
    assert data["y"].shape == (537, 4)
    assert (smoke == 0).sum() == 350
    assert data["y"].sum() == 326
    assert data["y"][smoke == 0].sum(0).tolist() == [56, 52, 50, 37]
    assert data["y"][smoke == 1].sum(0).tolist() == [31, 39, 35, 26]


@pytest.mark.skipif("SFVI_DATA" not in os.environ, reason="SFVI_DATA names no folder with the original files")
def test_six_cities_is_the_original_file():
    with open(Path(os.environ["SFVI_DATA"]) / "six_cities" / "ohio.csv") as file:
        rows = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
    original = sorted((r["smoke"], *(s["resp"] for s in rows[4 * i : 4 * i + 4])) for i, r in enumerate(rows[::4]))
    data = sfvi.data.six_cities()
    ours = sorted(zip(data["x"][:, 0, 1], *data["y"].T, strict=True))
    np.testing.assert_array_equal(np.array(ours), np.array(original))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(0, 1000))
def test_a_split_deals_every_unit_once(sizes, seed):
    data = {"u": np.arange(sum(sizes)), "v": np.arange(2 * sum(sizes)).reshape(-1, 2)}
    silos, ids = sfvi.data.split_units(data, sizes, seed=seed)
    assert [len(silo["u"]) for silo in silos.values()] == sizes
    assert sorted(np.concatenate([silo["u"] for silo in silos.values()])) == list(range(sum(sizes)))
    for name, silo in silos.items():
        np.testing.assert_array_equal(silo["u"], ids[name])
        np.testing.assert_array_equal(silo["v"][:, 0], 2 * ids[name])
    assert list(silos) == sorted(silos)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [([3, 3], "add up to 6"), ([5, 0], "at least one unit"), ([4, 2, -1], "at least one unit"), ([], "add up to 0")],
)
def test_sizes_must_fit(sizes, message):
    with pytest.raises(sfvi.OptionError, match=message):
        sfvi.data.split_units({"u": np.arange(5)}, sizes, seed=0)


@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 1000))
def test_an_equal_split_deals_every_unit_once(total, num_silos, seed):
    if num_silos > total:
        with pytest.raises(sfvi.OptionError, match=f"between 1 and {total}"):
            sfvi.data.equally(total, num_silos, seed=seed)
        return
    ids = sfvi.data.equally(total, num_silos, seed=seed)
    sizes = [len(units) for units in ids.values()]
    assert (len(ids), sum(sizes)) == (num_silos, total)
    assert max(sizes) - min(sizes) <= 1
    assert np.array_equal(np.sort(np.concatenate(list(ids.values()))), np.arange(total))
    again = sfvi.data.equally(total, num_silos, seed=seed)
    assert all(np.array_equal(ids[name], again[name]) for name in ids)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(0, 1000))
def test_a_split_by_size_has_exactly_those_sizes(sizes, seed):
    ids = sfvi.data.by_size(sizes, seed=seed)
    assert [len(units) for units in ids.values()] == sizes
    assert np.array_equal(np.sort(np.concatenate(list(ids.values()))), np.arange(sum(sizes)))
    named = sfvi.data.by_size({f"hospital {i}": size for i, size in enumerate(sizes)}, seed=seed)
    assert all(np.array_equal(a, b) for a, b in zip(ids.values(), named.values(), strict=True))


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=100), st.integers(1, 12))
def test_a_sorted_split_deals_every_unit_once_in_order(values, num_silos):
    if num_silos > len(values):
        with pytest.raises(sfvi.OptionError, match="number of silos"):
            sfvi.data.by_order(values, num_silos)
        return
    ids = sfvi.data.by_order(values, num_silos)
    sizes = [len(units) for units in ids.values()]
    assert max(sizes) - min(sizes) <= 1
    order = np.concatenate(list(ids.values()))
    assert np.array_equal(np.sort(order), np.arange(len(values)))
    pairs = [(values[unit], unit) for unit in order]
    assert pairs == sorted(pairs)


COVARIATES = "age sex cp trestbps chol fbs restecg thalach exang oldpeak slope ca thal"


def test_the_hospitals_have_their_published_margins():
    silos = sfvi.data.heart_disease()
    assert {name: (len(frame), frame["disease"].sum()) for name, frame in silos.items()} == {
        "cleveland": (303, 139),
        "hungarian": (294, 106),
        "switzerland": (123, 115),
        "va": (200, 149),
    }
    for frame in silos.values():
        assert frame.columns.tolist() == [*COVARIATES.split(), "disease"]
        assert set(frame["disease"]) == {0, 1}


def test_what_a_hospital_does_not_know_is_nan():
    silos = sfvi.data.heart_disease()
    missing = {name: frame.isna().sum() for name, frame in silos.items()}
    assert missing["cleveland"].sum() == 6
    assert missing["hungarian"]["chol"] == 23
    assert missing["switzerland"]["chol"] == 123  # written 0 in the file
    assert (missing["va"]["chol"], missing["va"]["trestbps"]) == (7 + 49, 56 + 1)  # written ?, and written 0
    complete = [len(frame.drop(columns=["chol", "slope", "ca", "thal"]).dropna()) for frame in silos.values()]
    assert complete == [303, 284, 46, 133]


def idx(array):
    """The original files' format, before compression."""
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.astype(np.uint8).tobytes()


UNCOMPRESSED = {  # sha256 of the four original files, decompressed
    "mnist": [
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ],
    "fashion_mnist": [
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ],
}


def need(dataset):
    """Skip unless the real files are at hand: tests download nothing."""
    folder = Path(os.environ.get("SFVI_DATA") or pooch.os_cache("sfvi")) / dataset
    if not (folder / f"{dataset}.npz").is_file() and not all((folder / name).is_file() for name in images.FILES):
        pytest.skip(f"{dataset} is neither in the folder that SFVI_DATA names nor in the cache")


@pytest.mark.parametrize("dataset", UNCOMPRESSED)
def test_images_are_the_original_ones(dataset):
    need(dataset)
    arrays = getattr(sfvi.data, dataset)()
    assert [array.dtype for array in arrays] == [np.uint8, np.int32, np.uint8, np.int32]
    assert [hashlib.sha256(idx(array)).hexdigest() for array in arrays] == UNCOMPRESSED[dataset]


def test_the_fives_bound_the_paper_s_split_of_mnist():
    need("mnist")
    data = sfvi.data.mnist()
    for labels, sizes in [(data.train_y, {10: 5421, 50: 1084}), (data.test_y, {10: 892, 50: 178})]:
        for num_silos, size in sizes.items():
            ids = sfvi.data.by_label(labels, num_silos, seed=0)
            assert {len(units) for units in ids.values()} == {size}
            assert [np.bincount(labels[i]).argmax() for i in ids.values()] == [j % 10 for j in range(num_silos)]


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A small data set in MNIST's place: its arrays, its files on a server, and an empty cache."""
    rng = np.random.default_rng(0)
    shapes = [(30, 28, 28), (30,), (20, 28, 28), (20,)]
    arrays = [rng.integers(0, 10, shape, dtype=np.uint8) for shape in shapes]
    served, cache = tmp_path / "served", tmp_path / "cache"
    served.mkdir()
    for name, array in zip(images.FILES, arrays, strict=True):
        (served / name).write_bytes(gzip.compress(idx(array)))
    checksums = tuple(hashlib.sha256((served / name).read_bytes()).hexdigest() for name in images.FILES)

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=served))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.delenv("SFVI_DATA", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(pooch, "os_cache", lambda project: cache / project)
    monkeypatch.setitem(images.URLS, "mnist", f"http://127.0.0.1:{server.server_port}/")
    monkeypatch.setitem(images.CHECKSUMS, "mnist", checksums)
    yield SimpleNamespace(arrays=arrays, served=served, cache=cache)
    server.shutdown()
    server.server_close()
    thread.join()


def files(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_images_are_downloaded_once(fake, monkeypatch):
    for _ in range(2):
        for loaded, array in zip(sfvi.data.mnist(), fake.arrays, strict=True):
            np.testing.assert_array_equal(loaded, array)
        monkeypatch.setitem(images.URLS, "mnist", "http://127.0.0.1:9/")
    assert files(fake.cache) == sorted(images.FILES)


def test_a_wrong_checksum_keeps_nothing(fake):
    (fake.served / images.FILES[0]).write_bytes(b"Please log in to this network.")
    with pytest.raises(
        sfvi.DataError, match=r"^mnist: http\S+ is not the file it should be [^.]+sha256.+SFVI_DATA.+\.$"
    ):
        sfvi.data.mnist()
    assert files(fake.cache) == []


@pytest.mark.parametrize("reason", ["refused", "not found"])
def test_without_a_network_the_data_set_and_the_way_out_are_named(fake, monkeypatch, reason):
    if reason == "refused":
        monkeypatch.setitem(images.URLS, "mnist", "http://127.0.0.1:9/")
    else:
        (fake.served / images.FILES[0]).unlink()
    with pytest.raises(sfvi.DataError, match=r"^mnist: http\S+ could not be downloaded .+ SFVI_DATA .+\.$"):
        sfvi.data.mnist()
    assert files(fake.cache) == []


@pytest.mark.parametrize("format", ["npz", "original"])
def test_sfvi_data_names_the_folder_to_read(fake, tmp_path, monkeypatch, format):
    folder = tmp_path / "own" / "mnist"
    folder.mkdir(parents=True)
    if format == "npz":
        np.savez_compressed(folder / "mnist.npz", **dict(zip(images.ARRAYS, fake.arrays, strict=True)))
    else:
        for name in images.FILES:
            (folder / name).write_bytes((fake.served / name).read_bytes())
    monkeypatch.setenv("SFVI_DATA", str(folder.parent))
    for loaded, array in zip(sfvi.data.mnist(), fake.arrays, strict=True):
        np.testing.assert_array_equal(loaded, array)
    assert not fake.cache.exists()


def cut(folder, arrays):
    np.savez_compressed(folder / "mnist.npz", **dict(zip(images.ARRAYS, arrays, strict=True)))
    content = (folder / "mnist.npz").read_bytes()
    (folder / "mnist.npz").write_bytes(content[: len(content) // 2])


def damaged(folder, arrays):
    for name in images.FILES:
        (folder / name).write_bytes(gzip.compress(b"no images")[:-4])


BAD_FOLDERS = {
    "no folder": (lambda folder, arrays: folder.rmdir(), "no folder 'mnist'"),
    "no files": (lambda folder, arrays: None, "neither mnist.npz nor train-images"),
    "cut archive": (cut, "cannot be read"),
    "damaged files": (damaged, "cannot be read"),
    "other arrays": (lambda folder, arrays: np.savez(folder / "mnist.npz", x=arrays[0]), "x_train.+replace them"),
    "labels that do not fit": (
        lambda folder, arrays: np.savez(
            folder / "mnist.npz", **dict(zip(images.ARRAYS, [*arrays[:3], arrays[1]], strict=True))
        ),
        r"images of shape \(20, 28, 28\) with labels of shape \(30,\)",
    ),
}


@pytest.mark.parametrize(("spoil", "message"), BAD_FOLDERS.values(), ids=BAD_FOLDERS)
def test_a_folder_that_cannot_be_used_is_said_so(fake, tmp_path, monkeypatch, spoil, message):
    folder = tmp_path / "own" / "mnist"
    folder.mkdir(parents=True)
    spoil(folder, fake.arrays)
    monkeypatch.setenv("SFVI_DATA", str(folder.parent))
    with pytest.raises(sfvi.DataError, match=rf"^mnist: .*{message}") as caught:
        sfvi.data.mnist()
    assert "\n" not in str(caught.value)
    assert not fake.cache.exists()


LABELS = st.lists(st.integers(0, 4), min_size=1, max_size=200)


def check_disjoint(ids, labels, num_silos):
    assert len(ids) == num_silos
    assert list(ids) == sorted(ids)
    dealt = np.concatenate(list(ids.values()))
    assert len(np.unique(dealt)) == len(dealt)
    assert dealt.min() >= 0
    assert dealt.max() < len(labels)


@given(LABELS, st.integers(1, 12), st.floats(0, 1), st.integers(0, 1000))
def test_silos_by_label_are_equally_large_and_mostly_of_one_label(labels, num_silos, share, seed):
    values, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    own = np.arange(num_silos) % len(values)
    first = own if share >= 0.5 else (own + 1) % len(values)  # labels of the silos if each had one unit
    if (len(values) == 1 and share < 1) or (np.bincount(first, minlength=len(values)) > counts).any():
        with pytest.raises(sfvi.OptionError):
            sfvi.data.by_label(labels, num_silos, share=share, seed=seed)
        return
    ids = sfvi.data.by_label(labels, num_silos, share=share, seed=seed)
    check_disjoint(ids, labels, num_silos)
    assert len({len(units) for units in ids.values()}) == 1
    for label, units in zip(own, ids.values(), strict=True):
        of_label = np.bincount(codes[units], minlength=len(values))
        assert abs(of_label[label] - share * len(units)) <= 0.5
        others = np.delete(of_label, label)
        assert len(others) == 0 or np.ptp(others) <= 1
    again = sfvi.data.by_label(labels, num_silos, share=share, seed=seed)
    assert all(np.array_equal(ids[name], again[name]) for name in ids)


@given(st.lists(st.integers(1, 40), min_size=2, max_size=6), st.integers(1, 4), st.floats(0, 1))
def test_the_rarest_label_bounds_silos_by_label(counts, silos_per_label, share):
    """Each label is dealt as often as any other, so nothing but the rarest one is used up."""
    labels = np.repeat(np.arange(len(counts)), counts)
    size = min(counts) // silos_per_label
    if size == 0:
        with pytest.raises(sfvi.OptionError, match="too few"):
            sfvi.data.by_label(labels, silos_per_label * len(counts), share=share, seed=0)
    else:
        ids = sfvi.data.by_label(labels, silos_per_label * len(counts), share=share, seed=0)
        assert {len(units) for units in ids.values()} == {size}


@given(LABELS, st.integers(1, 6), st.floats(1e-3, 1e6), st.integers(0, 1000))
def test_a_dirichlet_split_deals_every_unit_once(labels, num_silos, concentration, seed):
    try:
        ids = sfvi.data.dirichlet(labels, num_silos, concentration=concentration, seed=seed)
    except sfvi.OptionError:
        assert num_silos > 1  # a silo got none
        return
    check_disjoint(ids, labels, num_silos)
    assert sum(len(units) for units in ids.values()) == len(labels)
    assert min(len(units) for units in ids.values()) > 0
    again = sfvi.data.dirichlet(labels, num_silos, concentration=concentration, seed=seed)
    assert all(np.array_equal(ids[name], again[name]) for name in ids)


def test_the_proportions_of_a_dirichlet_split_have_its_variance():
    """The share of a label in a silo varies by (1/J)(1 - 1/J) / (J alpha + 1)."""
    num_silos, concentration, num_labels, each = 4, 0.5, 1000, 300
    labels = np.repeat(np.arange(num_labels), each)
    ids = sfvi.data.dirichlet(labels, num_silos, concentration=concentration, seed=0)
    shares = np.stack([np.bincount(labels[units], minlength=num_labels) for units in ids.values()]) / each
    spread = (shares - 1 / num_silos) ** 2
    expected = (1 / num_silos) * (1 - 1 / num_silos) / (num_silos * concentration + 1)
    assert (np.abs(shares.mean(1) - 1 / num_silos) < 4 * shares.std(1) / num_labels**0.5).all()
    assert (np.abs(spread.mean(1) - expected) < 4 * spread.std(1) / num_labels**0.5).all()


def test_another_seed_is_another_split():
    labels = np.arange(1000) % 10
    for split in [
        partial(sfvi.data.by_label, labels, 5),
        partial(sfvi.data.dirichlet, labels, 5, concentration=1.0),
        partial(sfvi.data.equally, 1000, 5),
    ]:
        assert not np.array_equal(split(seed=0)["silo-0"], split(seed=1)["silo-0"])


BAD_SPLITS = {
    "no silo": (lambda: sfvi.data.by_label([0, 1], 0, seed=0), "by_label: the number of silos is 0"),
    "share": (lambda: sfvi.data.by_label([0, 1], 2, share=1.5, seed=0), "share is 1.5"),
    "share nan": (lambda: sfvi.data.by_label([0, 1], 2, share=float("nan"), seed=0), "share is nan"),
    "one label": (lambda: sfvi.data.by_label([7, 7], 2, seed=0), "all labels are 7"),
    "few units": (lambda: sfvi.data.by_label([0, 1, 1], 4, seed=0), "too few for 4 silos"),
    "one-hot": (lambda: sfvi.data.by_label(np.eye(3), 2, seed=0), r"shape \(3, 3\); give one label a unit"),
    "no units": (
        lambda: sfvi.data.dirichlet([], 2, concentration=1.0, seed=0),
        r"dirichlet: the labels have shape \(0,\)",
    ),
    "one-hot order": (lambda: sfvi.data.by_order(np.eye(3), 2), r"shape \(3, 3\); give one finite number"),
    "negative": (lambda: sfvi.data.dirichlet([0, 1], 2, concentration=-1.0, seed=0), "concentration is -1.0"),
    "infinite": (lambda: sfvi.data.dirichlet([0, 1], 9, concentration=1e308, seed=0), r"concentration is 1e\+308"),
    "empty silo": (
        lambda: sfvi.data.dirichlet([0, 1], 3, concentration=1.0, seed=0),
        "of 3 silos got none of the 2 units",
    ),
}


@pytest.mark.parametrize(("split", "message"), BAD_SPLITS.values(), ids=BAD_SPLITS)
def test_an_impossible_split_is_said_so(split, message):
    with pytest.raises(sfvi.OptionError, match=message):
        split()
