"""Where the files of large data sets are: in the folder that SFVI_DATA names, or downloaded once and kept."""

import os
from pathlib import Path

from ..errors import DataError

VARIABLE = "SFVI_DATA"


def own_folder(dataset: str) -> Path | None:
    """The folder of a data set inside the one that SFVI_DATA names; None if it names none."""
    root = os.environ.get(VARIABLE)
    if not root:
        return None
    folder = Path(root).expanduser() / dataset
    if not folder.is_dir():
        raise DataError(
            f"{dataset}: {VARIABLE} is {root!r}, which has no folder {dataset!r}; add it, or unset {VARIABLE} to "
            "download."
        )
    return folder


def cache_folder(dataset: str) -> Path:
    """The folder that keeps a data set's downloads."""
    import pooch  # a tenth of a second, and only for those who download

    return Path(pooch.os_cache("sfvi")) / dataset


def download(dataset: str, url: str | dict[str, str], checksums: dict[str, str]) -> Path:
    """Download the files that are not there yet.

    Args:
        dataset: Name of the data set.
        url: The files' common beginning, or the address of each.
        checksums: sha256 by file name; a file with another one is never kept.

    Returns:
        The folder that holds them.
    """
    import pooch

    folder = cache_folder(dataset)
    for name, checksum in checksums.items():
        address = url[name] if isinstance(url, dict) else url + name
        try:
            pooch.retrieve(address, known_hash=f"sha256:{checksum}", fname=name, path=folder)
        except OSError as error:  # every failure of the network or the disk; first, as some are ValueErrors too
            raise DataError(
                f"{dataset}: {address} could not be downloaded to {folder} ({type(error).__name__}); check the "
                f"network and the folder, or set {VARIABLE} to a folder that holds {dataset}/."
            ) from error
        except ValueError as error:
            raise DataError(
                f"{dataset}: {address} is not the file it should be (its sha256 differs) and was not kept; try "
                f"again, or set {VARIABLE} to a folder that holds {dataset}/."
            ) from error
    return folder
