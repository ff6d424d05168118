"""20 Newsgroups (Lang 1995), the version sorted by date: posts to be modelled by topic."""

import gzip
import json
import re
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import DataError
from ..topics import check_bag
from .store import download, own_folder
from .text import padded

DATASET = "newsgroups20"
RAW = "20news_bydate_raw.jsonl.gz"
ARCHIVE = "20news-bydate.tar.gz"
URL = "https://ndownloader.figshare.com/files/5975967"
CHECKSUM = "8f1b2514ca22a5ade8fbb9cfa5727df95fa587f4c87b786e15c759fa66d95610"
NUM_POSTS = 18_846
ENCODED = 40  # letters from which a line is looked at
INTRODUCES_QUOTE = re.compile(r"(writes in|writes:|wrote:|says:|said:|^In article|^Quoted from|^\||^>)")


class Posts(NamedTuple):
    """Posts, those to train with first.

    Attributes:
        texts: As they were sent, headers and all.
        groups: Newsgroup of each.
        train: Whether a post is one of the 11,314 to train with.
    """

    texts: list[str]
    groups: np.ndarray
    train: np.ndarray


class Bag(NamedTuple):
    """Bags of words as others published them.

    Attributes:
        vocabulary: The words.
        parts: For each part of the corpus (`train`, `test`, ...) its documents, as `sfvi.data.text.bag_of_words` gives
            them.
    """

    vocabulary: list[str]
    parts: dict[str, dict[str, np.ndarray]]


def newsgroups() -> Posts:
    """Load the posts, raw.

    If the environment variable SFVI_DATA names a folder, its folder `newsgroups20` must hold either
    `20news_bydate_raw.jsonl.gz` (an object with `subset`, `group`, `id` and `text` a line) or the original
    `20news-bydate.tar.gz`. Otherwise that is downloaded the first time (14 MB), compared with its sha256 and kept in
    the user's cache folder.
    """
    folder = own_folder(DATASET)
    if folder is None:
        folder = download(DATASET, {ARCHIVE: URL}, {ARCHIVE: CHECKSUM})
    lines, archive = folder / RAW, folder / ARCHIVE
    if not lines.is_file() and not archive.is_file():
        raise DataError(f"{DATASET}: {folder} has neither {RAW} nor {ARCHIVE}; add the one or the other.")
    try:
        found = _read_lines(lines) if lines.is_file() else _read_archive(archive)
    except (OSError, EOFError, KeyError, ValueError, tarfile.TarError, zlib.error) as error:
        raise DataError(f"{DATASET}: the files in {folder} cannot be read ({error}); replace them.") from error
    if len(found) != NUM_POSTS:
        raise DataError(f"{DATASET}: {folder} holds {len(found):,} posts instead of {NUM_POSTS:,}; replace the file.")
    found.sort(key=lambda post: (post[0] != "train", post[1], post[2]))
    subsets, groups, _, texts = zip(*found, strict=True)
    return Posts(list(texts), np.array(groups), np.array([subset == "train" for subset in subsets]))


def published_bag(corpus: str) -> Bag:
    """Bags of words that other topic models were published with, from the folder that SFVI_DATA names.

    Args:
        corpus: "avitm" (Srivastava & Sutton 2017, 1,995 words) or "etm" (Dieng, Ruiz & Blei 2020, 3,072 words).
    """
    if corpus not in ("avitm", "etm"):
        raise DataError(f"published_bag: corpus is {corpus!r}; choose 'avitm' or 'etm'.")
    folder = own_folder(DATASET)
    file = None if folder is None else folder / f"20news_{corpus}_bow.npz"
    if folder is None or file is None or not file.is_file():
        raise DataError(f"published_bag: 20news_{corpus}_bow.npz is not to be downloaded; set SFVI_DATA to its folder.")
    try:
        vocabulary = (folder / f"20news_{corpus}_vocab.txt").read_text().split()
        with np.load(file, allow_pickle=False) as stored:
            parts = sorted(name.removesuffix("_indptr") for name in stored.files if name.endswith("_indptr"))
            rows = {part: [stored[f"{part}_{kind}"] for kind in ("indptr", "indices", "counts")] for part in parts}
        bags = {part: padded(*found) for part, found in rows.items()}
        for bag in bags.values():
            check_bag(bag, len(vocabulary))
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(
            f"published_bag: the files of {corpus} in {folder} cannot be read ({error}); replace them."
        ) from error
    return Bag(vocabulary, bags)


def body(text: str) -> str:
    """A post without its header, the lines that quote others, encoded pictures and programs, and its signature."""
    _, _, text = text.partition("\n\n")
    lines = [line for line in text.splitlines() if not INTRODUCES_QUOTE.search(line) and not _is_encoded(line)]
    for position in range(len(lines) - 1, max(len(lines) - 12, 0), -1):  # a signature is short, and follows dashes
        if lines[position].strip() and not lines[position].strip(" -_=*~"):
            lines = lines[:position]
            break
    return "\n".join(lines)


def _is_encoded(line):
    """Long and without the spaces that a sentence of that length has."""
    return len(line) >= ENCODED and len(line.split()) < len(line) / 20


def _read_lines(path: Path):
    with gzip.open(path, "rt", encoding="utf-8") as file:
        posts = map(json.loads, file)
        return [(post["subset"], post["group"], post["id"], post["text"]) for post in posts]


def _read_archive(path: Path):
    found = []
    with tarfile.open(path) as archive:
        for member in archive:
            if member.isfile():
                folder, group, number = member.name.split("/")
                file = archive.extractfile(member)
                assert file is not None
                found.append((folder.removeprefix("20news-bydate-"), group, number, file.read().decode("latin-1")))
    return found
