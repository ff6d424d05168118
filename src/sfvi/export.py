"""Draws as tables and as ArviZ data, with names for their dimensions."""

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Array

if TYPE_CHECKING:
    import arviz

Draws = dict[str, Array]
Dims = dict[str, list[str]]
QUANTILES = (0.025, 0.5, 0.975)


class Group(NamedTuple):
    """A group of ArviZ data: values by site, draws on the first axis, and names of the other dimensions."""

    values: Mapping[str, Any]
    dims: Dims
    drawn: bool = True


def name_dims(
    known: Mapping[str, Sequence[str | None]], from_user: Mapping[str, Sequence[str]], sites: Sequence[str]
) -> Dims:
    """Names for all dimensions of each site: plates', then the user's for the rest in order."""
    dims = {}
    for name in sites:
        given = iter(from_user.get(name, []))
        dims[name] = [plate or next(given, f"{name}_dim_{axis}") for axis, plate in enumerate(known[name])]
    return dims


def usable_coords(draws: Mapping[str, Any], dims: Dims, coords: Mapping[str, Any], *, first: int = 1) -> dict[str, Any]:
    """Those of the user's labels that fit the number of members; `first` axes are of draws."""
    usable = {}
    for name, names in dims.items():
        for axis, dim in enumerate(names):
            if dim in coords and len(coords[dim]) == np.shape(draws[name])[axis + first]:
                usable[dim] = coords[dim]
    return usable


def inference_data(groups: Mapping[str, Group], coords: Mapping[str, Any]) -> "arviz.InferenceData":
    """Draws as one chain each.

    In `sample_stats` no draw is `diverging`, which independent draws cannot be; some plots ask for it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # ArviZ announces its next major version at import
        import arviz
    found = {}
    for name, (values, dims, drawn) in groups.items():
        usable = usable_coords(values, dims, coords, first=int(drawn))
        arrays = {site: np.array(value)[None] if drawn else np.array(value) for site, value in values.items()}
        if name == "sample_stats":
            arrays["diverging"] = np.zeros(next(iter(arrays.values())).shape, bool)
        first = ["chain", "draw"] if drawn else []
        made = arviz.dict_to_dataset(arrays, coords=usable, dims=dims, default_dims=first)
        for site, value in arrays.items():
            if value.ndim == 0:  # ArviZ gives it a dimension, which draws of it do not have
                (extra,) = made[site].dims
                made = made.assign({site: made[site].isel({extra: 0}, drop=True)}).drop_vars([extra], errors="ignore")
        found[name] = made
    return arviz.InferenceData(**found)


def axis_labels(draws: Mapping[str, Any], dims: Dims, coords: Mapping[str, Any]) -> dict[str, list[list[str]]]:
    """For each site the labels along each of its axes: the user's where they fit, else numbers."""
    usable = usable_coords(draws, dims, coords)
    return {
        name: [
            [str(label) for label in usable.get(dim, range(size))]
            for dim, size in zip(dims[name], np.shape(values)[1:], strict=True)
        ]
        for name, values in draws.items()
    }


def coordinate(name: str, labels: Sequence[Sequence[str]], index: tuple[int, ...]) -> str:
    """The name of one coordinate of a site, like `beta[smoke]`."""
    inside = ", ".join(labels[axis][i] for axis, i in enumerate(index))
    return f"{name}[{inside}]" if index else name


def summarize(
    draws: Draws, dims: Dims, coords: Mapping[str, Any], quantiles: Sequence[float] = QUANTILES
) -> pd.DataFrame:
    """Mean, sd and quantiles of every coordinate; a row is named `beta[smoke]`."""
    labels, rows = axis_labels(draws, dims, coords), {}
    for name, values in draws.items():
        values = np.asarray(values, np.float64)
        for index in np.ndindex(values.shape[1:]):
            column = values[(slice(None), *index)]
            rows[coordinate(name, labels[name], index)] = [
                column.mean(),
                column.std(ddof=1),
                *np.quantile(column, quantiles),
            ]
    columns = ["mean", "sd", *(f"{100 * q:g}%" for q in quantiles)]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns)
