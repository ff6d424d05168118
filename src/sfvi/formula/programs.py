r"""The two NumPyro programs of a formula.

$$g(\mathrm{E}\, y_n) = o_n + x_n \cdot \beta + \sum_f z_{fn} \cdot b_{f, i_f(n)}, \qquad b_{fi} \sim N(0, \Sigma_f)$$

with $i_f(n)$ the group of row $n$ by factor $f$, or the silo itself. Inside, coefficients and effects are of recoded
columns (`recoding.py`) and of a gaussian outcome divided by its sd; what is reported is on the original scale:
$\beta = s_y T z + c$, $b = s_y T_f u$ and $\Sigma_f = s_y^2\, T_f \tilde\Sigma_f T_f^\top$.
"""

import itertools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from ..model import StructuredModel
from .design import BlockDesign, Design
from .distributions import Recoded, Rescaled
from .parsing import SILO
from .priors import Priors, correlation_names, sd_name
from .wording import wording


class Shared(NamedTuple):
    """What the silo program needs of the population.

    Attributes:
        coefficients: Inner ones; None if there are no fixed effects.
        extra: The family's own parameter, of the scaled outcome; None if it has none.
        roots: For each factor the sd of its effect, or the Cholesky factor of their covariance.
    """

    coefficients: Any
    extra: Any
    roots: dict[str, Any]


def build(design: Design, priors: Priors) -> StructuredModel:
    """The structured model of a design.

    Args:
        design: How rows become arrays.
        priors: By name.
    """

    def population():
        return Shared(_coefficients(design, priors), _extra(design, priors), _roots(design, priors))

    def silo(shared, data):
        eta = jnp.zeros(data["y"].shape)
        if shared.coefficients is not None:
            eta = data["x"] @ shared.coefficients
        if "offset" in data:
            eta = eta + data["offset"]
        for block in design.blocks:
            eta = eta + _effects(design, block, shared.roots[block.name], data[f"group {block.name}"])
        with numpyro.plate("rows", eta.shape[0]):
            numpyro.sample("y", design.outcome.observe(eta, shared.extra, data.get("trials")), obs=data["y"])

    dims = {"beta": ["coefficient"], "beta scaled": ["coefficient"]}
    dims |= {f"b({block.name})": [f"effect of {block.name}"] for block in design.blocks}
    coords = {"coefficient": design.labels} | {f"effect of {block.name}": block.effects for block in design.blocks}
    model = StructuredModel(population, silo, dims=dims, coords=coords)
    model.wording = wording(design, priors)
    return model


def _coefficients(design, priors):
    if not design.columns:
        return None
    shift, scale = design.outcome_scale
    matrix = scale * design.recoding.matrix
    constant = design.recoding.constant
    offset, judged = np.zeros(len(matrix)), np.eye(len(matrix))
    if constant is not None:
        offset = shift * constant
        if design.agreement.standardize:  # priors of the linear predictor at the means
            slopes = [bool(column.numeric) for column in design.columns]
            judged += np.outer(constant, design.recoding.at_means * slopes)
    inner = Recoded(list(priors.coefficients.values()), judged @ matrix, judged @ offset)
    same = np.array_equal(matrix, np.eye(len(matrix))) and not offset.any()
    z = numpyro.sample(_inner("beta", same), inner)
    _shown("beta", same, lambda: z @ jnp.asarray(matrix).T + jnp.asarray(offset))
    return z


def _extra(design, priors):
    name = design.outcome.extra
    if name is None:
        return None
    return _positive(name, priors.extra[name], design.outcome_scale[1])


def _roots(design, priors):
    roots = {}
    for block in design.blocks:
        matrix = design.outcome_scale[1] * block.recoding.matrix
        names = [sd_name(effect, block.name) for effect in block.effects]
        if len(names) == 1:
            roots[block.name] = _positive(names[0], priors.sds[names[0]], matrix[0, 0])
            continue
        sds = [
            numpyro.sample(_inner(name, False), Rescaled(priors.sds[name], unit))
            for name, unit in zip(names, np.diag(matrix), strict=True)
        ]
        correlation = numpyro.sample(
            f"root({block.name})", dist.LKJCholesky(len(names), priors.correlations[f"cor({block.name})"])
        )
        roots[block.name] = jnp.expand_dims(jnp.stack(sds), -1) * correlation
        _show_covariance(block, names, jnp.asarray(matrix) @ roots[block.name])
    return roots


def _show_covariance(block: BlockDesign, names, root):
    """Sds and correlations of the effects on the original scale."""
    sds = jnp.sqrt(jnp.sum(root**2, axis=-1))
    unit = root / jnp.expand_dims(sds, -1)
    for k, name in enumerate(names):
        numpyro.deterministic(name, sds[k])
    pairs = itertools.combinations(range(len(names)), 2)
    for name, (i, k) in zip(correlation_names(block.effects, block.name), pairs, strict=True):
        numpyro.deterministic(name, jnp.sum(unit[i] * unit[k]))


def _effects(design, block, root, data):
    """The part of the linear predictor that a factor adds to each row."""
    matrix = design.outcome_scale[1] * block.recoding.matrix
    name, same = f"b({block.name})", np.array_equal(matrix, np.eye(len(matrix)))
    single = len(matrix) == 1
    prior = dist.Normal(0.0, root) if single else dist.MultivariateNormal(jnp.zeros(len(matrix)), scale_tril=root)

    def effect():
        u: Any = numpyro.sample(_inner(name, same), prior)
        _shown(name, same, lambda: u * float(matrix[0, 0]) if single else u @ jnp.asarray(matrix).T)
        return u

    if block.name == SILO:
        u = effect()
        return data["z"][:, 0] * u if single else data["z"] @ u
    with numpyro.plate(f"groups({block.name})", data["ones"].shape[0]):
        u = effect()
    own = u[data["row"]]
    return data["z"][:, 0] * own if single else jnp.sum(data["z"] * own, axis=-1)


def _positive(name, prior, unit):
    """A positive parameter, sampled in units in which it is about 1."""
    same = unit == 1.0
    value = numpyro.sample(_inner(name, same), prior if same else Rescaled(prior, unit))
    _shown(name, same, lambda: value * float(unit))
    return value


def _inner(name, same):
    return name if same else f"{name} scaled"


def _shown(name, same, value):
    """Report what is on the original scale, unless it was sampled there."""
    if not same:
        numpyro.deterministic(name, value())
