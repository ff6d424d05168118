r"""Amortized local families: an inference network $f_\phi$ turns a unit's data into the parameters of its latents."""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .. import _jaxpr
from ..errors import DataError, OptionError, first_line
from .block import BlockGaussian, Parent, block
from .triangular import packed_size


class AmortizedBlock(eqx.Module):
    r"""Gaussian blocks $z_i$ with $(\mu_i, \log\sigma_i, L_i) = f_\phi(x_i)$, or $f_\phi(x_i, z_G)$.

    Attributes:
        network: $f_\phi$, its weights included; takes one unit.
        inputs: $x$, with the units on the first axis.
        size: Latents per unit.
        options: The choices of the user.
    """

    network: Callable
    inputs: PyTree[Any]
    size: int = eqx.field(static=True)
    options: "Amortized" = eqx.field(static=True)

    def given(self, parent: Parent) -> BlockGaussian:
        """Evaluate the network for every unit."""

        def one(unit):
            return self.network(unit, parent) if self.options.follow_globals else self.network(unit)

        out = jax.vmap(one, out_axes=-1)(self.inputs)
        full = self.options.within == "full" and self.size > 1
        loc, log_scale, lower = jnp.split(out, [self.size, 2 * self.size])
        return BlockGaussian(loc, log_scale, lower if full else None, None, None)

    def recentered(self, shift: Parent) -> "AmortizedBlock":
        """The same: the network sees the parents themselves, not their deviation."""
        del shift
        return self


@dataclasses.dataclass(frozen=True, eq=False)
class Amortized:
    """What `amortized` chose; builds the free blocks of all other latents too."""

    network: Callable
    inputs: Callable[[Any], Any]
    plate: str | None
    follow_globals: bool
    within: Literal["diagonal", "full"]
    otherwise: Callable[..., BlockGaussian]

    def __call__(self, *args, **kwargs) -> BlockGaussian:
        """Build a free block."""
        return self.otherwise(*args, **kwargs)

    def plate_of(self, silo: str, plates: list[str]) -> str | None:
        """The plate of a silo whose units the network serves; None if it does not have it."""
        if self.plate is not None:
            return self.plate if self.plate in plates else None
        if len(plates) != 1:
            raise OptionError(
                f"amortized: {silo} has {len(plates)} plates of units ({', '.join(plates)}); say which one the network "
                "serves with plate=."
            )
        return plates[0]

    def initial(self) -> PyTree:
        r"""The network's own weights, the start of $\phi$, in the precision of everything else."""
        weights = eqx.partition(self.network, eqx.is_inexact_array)[0]
        return jax.tree.map(lambda leaf: leaf.astype(jnp.result_type(float)), weights)

    def build(self, phi: PyTree, inputs: PyTree, size: int) -> AmortizedBlock:
        r"""The blocks of units with these inputs under the weights $\phi$."""
        rest = eqx.partition(self.network, eqx.is_inexact_array)[1]
        return AmortizedBlock(eqx.combine(phi, rest), inputs, size, self)

    def select_inputs(self, silo: str, data: Any, units: int) -> PyTree:
        """What the network sees of a silo's data, checked: the units on the first axis."""
        try:
            chosen = jax.tree.map(jnp.asarray, self.inputs(data))
        except Exception as error:
            raise OptionError(
                f"amortized: inputs fails on the data of {silo} ({first_line(error)}); it takes a silo's data and must "
                "be made of JAX operations."
            ) from error
        leaves = jax.tree.leaves(chosen)
        if not leaves or any(leaf.ndim == 0 or leaf.shape[0] != units for leaf in leaves):
            shapes = ", ".join(str(leaf.shape) for leaf in leaves) or "none"
            raise DataError(
                f"amortized: the inputs of {silo} have shape {shapes}; their first axis must count its {units} units."
            )
        return jax.tree.map(lambda leaf: leaf.astype(jnp.result_type(float)), chosen)

    def check(self, silo: str, inputs: PyTree, size: int, n_parent: int) -> None:
        """Try the network on abstract inputs of one unit: it must return the right number of parameters."""
        needed = 2 * size + (packed_size(size) if self.within == "full" else 0)
        try:
            found = jax.eval_shape(self._call, self.initial(), *self._arguments(one_unit(inputs), n_parent))
        except Exception as error:
            raise OptionError(
                f"amortized: the network cannot take one unit's inputs of {silo} ({first_line(error)}); check its "
                "sizes, and that it takes the global latents if follow_globals is True."
            ) from error
        if getattr(found, "shape", None) != (needed,):
            raise OptionError(
                f"amortized: the network returns {getattr(found, 'shape', found)} for one unit of {silo}; it must "
                f"return {needed} numbers: {size} means, {size} log scales"
                + (f" and {packed_size(size)} entries of L." if self.within == "full" else ".")
            )

    def fingerprint(self, unit: PyTree, n_parent: int) -> str:
        """A hash of what the network computes of abstract inputs of one unit, whatever its weights."""
        return _jaxpr.fingerprint(self._call, self.initial(), *self._arguments(unit, n_parent))

    def _call(self, phi, *args):
        return eqx.combine(phi, eqx.partition(self.network, eqx.is_inexact_array)[1])(*args)

    def _arguments(self, unit, n_parent):
        parent = jax.ShapeDtypeStruct((n_parent,), jnp.result_type(float))
        return (unit, parent) if self.follow_globals else (unit,)


def one_unit(inputs: PyTree) -> PyTree:
    """The abstract inputs of one of the units."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), inputs)


def amortized(
    network: Callable,
    inputs: Callable[[Any], Any],
    *,
    plate: str | None = None,
    follow_globals: bool = False,
    within: Literal["diagonal", "full"] = "diagonal",
    otherwise: Callable[..., BlockGaussian] | None = None,
) -> Amortized:
    r"""Infer the latents of units by a network instead of parameters for each unit.

    The weights $\phi$ are variational parameters that all silos share: gradients of them are summed as those of
    $\eta_G$ are. Units never seen in training have a posterior at once, see `fit_silo`.

    Args:
        network: Maps one unit's inputs to its latents' means, then log scales (then entries of L): an equinox module,
            a `flax.nnx` module, or a bound `flax.linen` module, `net.bind(net.init(key, x))`.
        inputs: Takes a silo's data, returns an array (or a tree of them) with the units on the first axis. It must
            treat every unit by itself: center or scale the data beforehand.
        plate: The plate whose units the network serves; may be left out if there is one.
        follow_globals: The network takes a second argument, the unconstrained global latents (followed by the
            silo's own, if it has any). Without it units do not follow the global latents, whose posterior is then too
            narrow, as with `block(coupling="none")`.
        within: Covariance inside a unit's block.
        otherwise: Family of all other local latents; `block()` by default.
    """
    if not callable(inputs):
        raise OptionError(f"amortized: inputs is {inputs!r}; give a function of a silo's data, like lambda d: d['x'].")
    if within not in ("diagonal", "full"):
        raise OptionError(f"amortized: within is {within!r}; choose 'diagonal' or 'full'.")
    otherwise = block() if otherwise is None else otherwise
    if not callable(otherwise) or isinstance(otherwise, Amortized) or otherwise in (block, amortized):
        raise OptionError(f"amortized: otherwise is {otherwise!r}; give what families.block() returns.")
    return Amortized(_as_equinox(network), inputs, plate, follow_globals, within, otherwise)


class _FlaxNetwork(eqx.Module):
    """A flax module as a tree of weights and a function."""

    weights: PyTree[Float[Array, "..."]]
    apply: Callable = eqx.field(static=True)

    def __call__(self, *args):
        return self.apply(self.weights, *args)


def _as_equinox(network):
    linen, nnx = sys.modules.get("flax.linen"), sys.modules.get("flax.nnx")
    if linen is not None and isinstance(network, linen.Module):
        if network.scope is None:
            raise OptionError("amortized: the flax.linen module has no weights; give net.bind(net.init(key, x)).")
        module, variables = network.unbind()
        return _FlaxNetwork(dict(variables), module.apply)
    if nnx is not None and isinstance(network, nnx.Module):
        graph, weights, rest = nnx.split(network, nnx.Param, ...)
        return _FlaxNetwork(
            nnx.to_pure_dict(weights), lambda pure, *args: nnx.merge(graph, _refill(weights, pure), rest)(*args)
        )
    if not callable(network) or not jax.tree.leaves(eqx.filter(network, eqx.is_inexact_array)):
        raise OptionError(
            f"amortized: network is {network!r}; give an equinox or flax module with weights, called with one unit."
        )
    return network


def _refill(weights, pure):
    from flax import nnx

    state = jax.tree.map(lambda leaf: leaf, weights)
    nnx.replace_by_pure_dict(state, pure)
    return state
