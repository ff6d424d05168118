r"""Prediction for new rows: draws of the linear predictor on the original scale.

$$\eta_n = o_n + x_n \cdot \beta + \sum_f z_{fn} \cdot b_{f, i_f(n)}$$

with fitted effects of groups that were seen, and of others draws from the population, $b_{fi} \sim N(0, \Sigma_f)$.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from .._random import as_key
from .._types import Key
from ..errors import OptionError
from ..posterior import GlobalPosterior, SiloPosterior
from .design import BlockDesign, Design
from .frames import Table
from .parsing import SILO
from .priors import correlation_names, sd_name

INVERSE = {"identity": lambda eta: eta, "logit": jax.nn.sigmoid, "log": jnp.exp}
KINDS = ("mean", "outcome")
ROUNDING = 1e-6  # of correlations in single precision
Groups = Mapping[str, Sequence[Any]]


def linear_predictor(
    design: Design,
    table: Table,
    posterior: GlobalPosterior | SiloPosterior,
    groups: Groups,
    *,
    num_samples: int,
    key: Key | int,
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Draws of the linear predictor, (draws, rows), and those of all latents that they go with.

    Args:
        design: How rows become columns.
        table: The rows.
        posterior: A silo's, or the global one for a silo that was not seen.
        groups: Ids of the groups whose effects the posterior holds, by factor.
        num_samples: Draws.
        key: Of the draws.
    """
    known_key, new_key = jax.random.split(as_key(key))
    drawn = {name: np.asarray(d, np.float64) for name, d in posterior.sample(known_key, num_samples).items()}
    offset, x, z = design.predictors(table)
    eta = np.broadcast_to(offset, (num_samples, len(offset))).copy()
    if design.columns:
        eta += drawn["beta"] @ x.T
    for number, block in enumerate(design.blocks):
        ids, row = ([SILO], np.zeros(len(offset), int)) if block.name == SILO else design.groups(table, block)
        effects = _effects(block, ids, groups, drawn, jax.random.fold_in(new_key, number))
        eta += np.einsum("srk,rk->sr", effects[:, row], z[block.name])
    return eta, drawn


def _effects(block: BlockDesign, ids, groups: Groups, drawn, key) -> np.ndarray:
    """Effects of these groups, (draws, groups, effects): those fitted, and draws from the population for others."""
    size = len(block.effects)
    root = _root(block, drawn)
    noise = np.asarray(jax.random.normal(key, (len(root), len(ids), size)), np.float64)
    effects = np.einsum("skl,sgl->sgk", root, noise)
    known = {group: place for place, group in enumerate(groups.get(block.name, ()))}
    seen = [place for place, group in enumerate(ids) if group in known]
    if seen:
        fitted = drawn[f"b({block.name})"].reshape(len(root), len(known), size)
        effects[:, seen] = fitted[:, [known[ids[place]] for place in seen]]
    return effects


def _root(block, drawn):
    """Cholesky factors of the effects' covariance, one for each draw."""
    sds = np.stack([drawn[sd_name(effect, block.name)] for effect in block.effects], axis=1)
    size = sds.shape[1]
    correlation = np.broadcast_to(np.eye(size), (len(sds), size, size)).copy()
    for name, (i, k) in zip(
        correlation_names(block.effects, block.name), zip(*np.triu_indices(size, 1), strict=True), strict=True
    ):
        correlation[:, i, k] = correlation[:, k, i] = drawn[name]
    return sds[:, :, None] * np.linalg.cholesky(correlation + ROUNDING * np.eye(size))


def outcome_draws(
    design: Design, table: Table, eta: np.ndarray, drawn: Mapping[str, np.ndarray], kind: str, key: Key | int
) -> np.ndarray:
    """Draws of the outcome's mean, of a binomial its probability; or of outcomes themselves."""
    if kind == "mean":
        return np.asarray(INVERSE[design.outcome.link](jnp.asarray(eta)), np.float64)
    extra = None if design.outcome.extra is None else jnp.asarray(drawn[design.outcome.extra])[:, None]
    made: Any = design.outcome.observe(jnp.asarray(eta), extra, design.trials(table))
    return np.asarray(made.sample(jax.random.fold_in(as_key(key), 1)), np.float64)


def tabulate(draws: np.ndarray, level: float, index: pd.Index) -> pd.DataFrame:
    """Mean, sd and interval of each row."""
    quantiles = (1 - level) / 2, (1 + level) / 2
    columns = {"mean": draws.mean(0), "sd": draws.std(0, ddof=1)}
    columns |= {f"{100 * q:g}%": np.quantile(draws, q, axis=0) for q in quantiles}
    return pd.DataFrame(columns, index=index)


def check_kind(kind: str, num_samples: int) -> None:
    """Refuse what cannot be predicted."""
    if kind not in KINDS:
        raise OptionError(f"predict: kind is {kind!r}; choose 'mean' or 'outcome'.")
    if isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 2:
        raise OptionError(f"predict: num_samples is {num_samples!r}; give a whole number of at least 2.")
