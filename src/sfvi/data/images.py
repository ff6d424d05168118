"""MNIST (LeCun, Cortes & Burges 1998) and Fashion-MNIST (Xiao, Rasul & Vollgraf 2017)."""

import gzip
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import DataError
from .store import download, own_folder

ARRAYS = ("x_train", "y_train", "x_test", "y_test")
FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
URLS = {
    "mnist": "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "fashion_mnist": "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
}
CHECKSUMS = {  # in the order of FILES
    "mnist": (
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    ),
    "fashion_mnist": (
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    ),
}


class Images(NamedTuple):
    """Gray images with their labels, in the original order.

    Attributes:
        train_x: (60000, 28, 28), uint8: 0 is background, 255 full ink.
        train_y: (60000,), int32: labels 0 to 9.
        test_x: (10000, 28, 28), as `train_x`.
        test_y: (10000,), as `train_y`.
    """

    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


def mnist() -> Images:
    """Load the handwritten digits 0 to 9.

    If the environment variable SFVI_DATA names a folder, its folder `mnist` must hold either `mnist.npz` (arrays
    `x_train`, `y_train`, `x_test`, `y_test`) or the four original files (`train-images-idx3-ubyte.gz`, ...). Otherwise
    those four are downloaded the first time (12 MB), compared with their sha256 and kept in the user's cache folder.

    Returns:
        The images; digits are not equally frequent (5421 fives to 6742 ones in the training set).
    """
    return _load("mnist")


def fashion_mnist() -> Images:
    """Load the pictures of clothes.

    Labels: 0 T-shirt/top, 1 trouser, 2 pullover, 3 dress, 4 coat, 5 sandal, 6 shirt, 7 sneaker, 8 bag, 9 ankle boot.
    The files are found as those of `mnist`, under the name `fashion_mnist` (31 MB to download).

    Returns:
        The images; every label has 6000 training and 1000 test images.
    """
    return _load("fashion_mnist")


def _load(dataset):
    folder = own_folder(dataset)
    if folder is None:
        folder = download(dataset, URLS[dataset], dict(zip(FILES, CHECKSUMS[dataset], strict=True)))
    archive = folder / f"{dataset}.npz"
    missing = [name for name in FILES if not (folder / name).is_file()]
    if not archive.is_file() and missing:
        raise DataError(f"{dataset}: {folder} has neither {archive.name} nor {missing[0]}; add the one or the other.")
    try:
        if archive.is_file():
            with archive.open("rb") as file, np.load(file, allow_pickle=False) as stored:
                arrays = [stored[name] for name in ARRAYS]
        else:
            arrays = [_read_idx(folder / name) for name in FILES]
        train_x, train_y, test_x, test_y = arrays
        _check(train_x, train_y)
        _check(test_x, test_y)
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{dataset}: the files in {folder} cannot be read ({error}); replace them.") from error
    return Images(train_x, train_y.astype(np.int32), test_x, test_y.astype(np.int32))


def _read_idx(path: Path):
    content = gzip.decompress(path.read_bytes())
    if content[:3] != b"\0\0\x08":  # two zero bytes, then the code of uint8, the number of axes, and each axis' length
        raise ValueError(f"{path.name} is no IDX file of bytes")
    start = 4 + 4 * content[3]
    shape = np.frombuffer(content[4:start], ">u4")
    return np.frombuffer(bytearray(content[start:]), np.uint8).reshape(shape)


def _check(images, labels):
    if images.dtype != np.uint8 or images.shape[1:] != (28, 28) or labels.shape != images.shape[:1]:
        raise ValueError(f"{images.dtype} images of shape {images.shape} with labels of shape {labels.shape}")
