"""What a fit returns: distributions to draw from, by site name, in the model's own space."""

import dataclasses
import os
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array

from . import archive, families
from ._compile import on_one_thread
from ._random import as_key
from ._types import Key, Theta
from .algorithms import SFVI, Elbo
from .bounds import Bound
from .enhanced import resample
from .errors import ArchiveError
from .families import (
    AbstractGlobalFamily,
    Amortized,
    AmortizedBlock,
    BlockGaussian,
    FullGaussian,
    Local,
    LowRankGaussian,
    MeanFieldGaussian,
    NormalizingFlow,
    StructuredLocal,
)
from .model import SiloData, StructuredModel
from .network_identity import inputs_identity, same_network
from .objectives import Shared
from .prediction import check_alike, check_sites, posterior_means

if TYPE_CHECKING:
    import arviz

GLOBAL_FAMILIES = {f.__name__: f for f in (FullGaussian, LowRankGaussian, MeanFieldGaussian)}
GLOBAL_KIND, SILO_KIND = "global posterior", "silo posterior"
DRAWS_AT_A_TIME = 50  # of a silo's latents; the rest waits, so that memory does not grow with their number
QUANTILES = (0.025, 0.5, 0.975)
Draws = dict[str, Array]


class GlobalPosterior:
    r"""The posterior of the global latents, $q(z_G; \eta_G)$, and the fitted $\theta$. It holds nothing local.

    Attributes:
        model: The model.
        shared: $\eta_G$, $\theta$ and $\phi$ in unconstrained space.
        theta: $\theta$ in the model's own space.
        local_family: The family of the silos' latents that was fitted.
        bound: What was maximized.
        network: What its inference network computes, see `network_identity`; None if it has none.
    """

    def __init__(
        self,
        model: StructuredModel,
        shared: Shared,
        theta: Theta,
        local_family: Callable,
        bound: Bound,
        network: dict[str, Any] | None = None,
    ):
        self.model = model
        self.shared = shared
        self.theta = theta
        self.local_family = local_family
        self.bound = bound
        self.network = network

    @property
    def family(self) -> AbstractGlobalFamily:
        """$q(z_G)$ in unconstrained space."""
        return self.shared.family

    def __repr__(self) -> str:
        sites = ", ".join(site.name for site in self.model.population.layout.sites)
        return f"<GlobalPosterior of {sites}: {type(self.family).__name__}>"

    def sample(self, key: Key | int = 0, num_samples: int = 1000) -> Draws:
        """Draw global latents and deterministic sites; draws are on the first axis."""
        population = self.model.population

        @jax.jit
        def draw(family, theta, noise):
            return population.outputs(family.sample(noise), theta)

        shape, dtype = (num_samples, self.family.noise_size), self.family.center.dtype
        noise = jax.random.normal(as_key(key), shape, dtype)
        return jax.vmap(draw, (None, None, 0))(self.family, self.shared.theta, noise)

    def summary(
        self, *, num_samples: int = 10_000, quantiles: Sequence[float] = QUANTILES, key: Key | int = 0
    ) -> pd.DataFrame:
        """Mean, sd and quantiles of every coordinate, from draws; a row is named `beta[smoke]`."""
        draws = self.sample(key, num_samples)
        return _summarize(draws, self._dims(draws), self.model.coords, quantiles)

    def to_arviz(self, *, num_samples: int = 1000, key: Key | int = 0) -> "arviz.InferenceData":
        """Export draws as one chain of the `posterior` group."""
        draws = self.sample(key, num_samples)
        return _inference_data(draws, self._dims(draws), self.model.coords)

    def save(self, path: str | os.PathLike) -> None:
        """Write to a file that holds nothing local."""
        arrays, header = self._contents()
        archive.write(path, arrays, {"kind": GLOBAL_KIND, **header})

    @classmethod
    def load(
        cls, path: str | os.PathLike, model: StructuredModel, *, local_family: Callable | None = None
    ) -> "GlobalPosterior":
        """Read a file written by `save`, for the model that made it.

        Args:
            path: The file.
            model: The model.
            local_family: The `families.amortized(...)` of the fit, if it had one; the file holds its weights.
        """
        return cls._from_contents(*archive.read(path, kind=GLOBAL_KIND), model, path, local_family)

    def _dims(self, draws):
        return _name_dims(draws, self.model.population.dims(self.shared.theta), self.model.dims)

    def _contents(self):
        free, paths = _flatten_theta(self.shared.theta, prefix="free_theta")
        own, _ = _flatten_theta(self.theta, prefix="theta")
        arrays = archive.flatten(self.family, prefix="family") | free | own
        arrays |= archive.flatten(self.shared.network, prefix="network")
        header = {
            "population": self.model.population.fingerprint(),
            "family": type(self.family).__name__,
            "theta": paths,
            "network": None if self.shared.network is None else self.network or {},
            "bound": list(self.bound),
        }
        if isinstance(self.family, NormalizingFlow):
            header["flow"] = dataclasses.asdict(self.family.settings)
        return arrays, header

    @classmethod
    def _from_contents(cls, arrays, header, model, path, local_family):
        if header["population"] != model.population.fingerprint():
            raise ArchiveError(
                f"{str(path)!r} was made with another population program, precision or version of jax or numpyro; load "
                "it with what made it."
            )
        family = _read_family(arrays, header, path)
        free, theta = (_unflatten_theta(arrays, header["theta"], prefix=p) for p in ("free_theta", "theta"))
        network = _read_network(arrays, header["network"], local_family, path)
        shared, bound = Shared(family, free, network), Bound(*header["bound"])
        return cls(model, shared, theta, local_family or families.block(), bound, header["network"])


class SiloPosterior:
    r"""The posterior of one silo's latents, jointly with the global ones: $q(z_G)\, q(z_{Lj} \mid z_G)$.

    It belongs to the silo and holds its data.

    Attributes:
        name: The silo.
        shared: The global posterior.
        family: $q(z_{Lj} \mid z_G)$ in unconstrained space.
        data: The silo's data.
        program: The silo whose program it uses, if not its own.
    """

    def __init__(
        self,
        name: str,
        shared: GlobalPosterior,
        family: StructuredLocal,
        data: SiloData,
        program: str | None = None,
    ):
        self.name = name
        self.shared = shared
        self.family = family
        self.data = data
        self.program = program

    def __repr__(self) -> str:
        return f"<SiloPosterior of {self.name!r}>"

    def sample(self, key: Key | int = 0, num_samples: int = 1000) -> Draws:
        """Draw the silo's latents and deterministic sites together with the global ones they go with."""
        global_key, local_key = jax.random.split(as_key(key))
        shared, dtype = self.shared, self.shared.family.center.dtype
        noise = jax.random.normal(global_key, (num_samples, shared.family.noise_size), dtype)
        num_draws = shared.bound.draws_of_units
        keys = jax.random.split(local_key, num_samples)

        @on_one_thread
        def draw(shared, local, data, noise, keys):
            def one(inputs):
                noise, key = inputs
                z_global, z_local = _draw(key, shared, local, data, noise, num_draws)
                drawn = data.program.population.outputs(z_global, shared.theta)
                return drawn | data.program.outputs(z_global, z_local, shared.theta, data)

            return jax.lax.map(one, (noise, keys), batch_size=DRAWS_AT_A_TIME)

        return draw(shared.shared, self.family, self.data, noise, keys)

    def summary(
        self, *, num_samples: int = 2000, quantiles: Sequence[float] = QUANTILES, key: Key | int = 0
    ) -> pd.DataFrame:
        """Mean, sd and quantiles of every coordinate of the silo's own sites, from draws."""
        draws = self.sample(key, num_samples)
        own = {name: draws[name] for name in self._own_dims()}
        return _summarize(own, self._dims(own), self.shared.model.coords, quantiles)

    def to_arviz(self, *, num_samples: int = 1000, key: Key | int = 0) -> "arviz.InferenceData":
        """Export draws, local and global, as one chain of the `posterior` group."""
        draws = self.sample(key, num_samples)
        return _inference_data(draws, self._dims(draws), self.shared.model.coords)

    def predict(
        self, data: Any, *, sites: Sequence[str] | None = None, num_samples: int = 100, key: Key | int = 0
    ) -> dict[str, np.ndarray]:
        """Posterior means of deterministic sites, like probabilities, for other data of this silo.

        For silos whose latents are their own as a whole: new members of a plate with latents would have to be fitted.

        Memory does not grow with the number of draws, and silos whose data have the same shapes share what is compiled.

        Args:
            data: As in the fit, with other rows. What the program observes must be there too, but its values do not
                matter: zeros will do.
            sites: Deterministic sites of the silo program; by default all.
            num_samples: Draws of all latents.
            key: Of the draws.
        """
        model = self.shared.model
        new = model.silo_data(self.name, data, program=self.program)
        check_alike(self.name, self.data, new, num_samples)
        inputs = self.shared.shared, self.family, new, as_key(key), num_samples
        check_sites(self.name, list(eqx.filter_eval_shape(posterior_means, *inputs)), sites)
        found = posterior_means(*inputs)
        return {site: np.asarray(found[site]) for site in (sites or found)}

    def save(self, path: str | os.PathLike) -> None:
        """Write this silo's posterior, and the global one, but no other silo's and no data."""
        arrays, header = self.shared._contents()
        arrays |= _flatten_local(self.free)
        header |= {"plates": sorted(self.free.units)}
        header |= {"program": self.data.program.fingerprint(self.data), "data": self.data.fingerprint()}
        header |= {"inputs": inputs_identity(self.shared.local_family, self.data)}
        archive.write(path, arrays, {"kind": SILO_KIND, "silo": self.name, "program of": self.program, **header})

    @classmethod
    def load(
        cls, path: str | os.PathLike, model: StructuredModel, data: Any, *, local_family: Callable | None = None
    ) -> "SiloPosterior":
        """Read a file written by `save`, for the model and the silo's data that made it.

        Args:
            path: The file.
            model: The model.
            data: The silo's data.
            local_family: The `families.amortized(...)` of the fit, if it had one; the file holds its weights.
        """
        arrays, header = archive.read(path, kind=SILO_KIND)
        shared = GlobalPosterior._from_contents(arrays, header, model, path, local_family)
        silo = model.silo_data(header["silo"], data, program=header["program of"])
        if header["program"] != silo.program.fingerprint(silo):
            raise ArchiveError(
                f"{str(path)!r} was made with another silo program or other data shapes than those given for "
                f"silo {header['silo']!r}."
            )
        if header["data"] != silo.fingerprint():
            raise ArchiveError(f"{str(path)!r} was made with other data than those given for silo {header['silo']!r}.")
        if header["inputs"] != inputs_identity(shared.local_family, silo):
            raise ArchiveError(
                f"{str(path)!r} was made with other inputs of the inference network than those of local_family, or "
                "with another version of jax; give the families.amortized(...) of the fit."
            )
        free = _read_local(arrays, header["plates"])
        elbo = Elbo(SFVI(local_family=shared.local_family), model)
        family = elbo.local(shared.shared, free, silo)
        return cls(header["silo"], shared, family, silo, header["program of"])

    @property
    def free(self) -> StructuredLocal:
        """The part of the family that has parameters of its own in the silo: all that is not amortized."""
        amortized = [plate for plate, block in self.family.units.items() if isinstance(block, AmortizedBlock)]
        units = {plate: block for plate, block in self.family.units.items() if plate not in amortized}
        return StructuredLocal(self.family.silo, units)

    def _own_dims(self):
        return self.data.program.dims(self._zeros(), self.shared.shared.theta, self.data)

    def _zeros(self):
        layout, dtype = self.data.program.layout, self.shared.family.center.dtype
        own = jnp.zeros((layout.own.size, 1), dtype) if layout.own.size else None
        return Local(own, {g.plate.name: jnp.zeros((g.block, g.plate.size), dtype) for g in layout.groups})

    def _dims(self, draws):
        model = self.shared.model
        known = model.population.dims(self.shared.shared.theta) | self._own_dims()
        return _name_dims(draws, known, model.dims)


def _draw(key, shared, local, data, noise, num_draws):
    """One draw of all latents; with the locally enhanced bound, chosen among K of each unit."""
    own_key, units_key, choice_key = jax.random.split(key, 3)
    layout, dtype = data.program.layout, shared.family.center.dtype
    own = jax.random.normal(own_key, (layout.own.size, 1), dtype) if layout.own.size else None
    units = {
        group.plate.name: jax.random.normal(
            jax.random.fold_in(units_key, position), (num_draws, group.block, group.plate.size), dtype
        )
        for position, group in enumerate(layout.groups)
    }
    if num_draws > 1 and units:
        return resample(choice_key, data, shared, local, noise, Local(own, units))
    z_global = shared.family.sample(noise)
    first = Local(own, {plate: values[0] for plate, values in units.items()})
    return z_global, local.sample(first, z_global, shared.family.center)


def _read_network(arrays, identity, local_family, path):
    """The weights on file, if there are any: `local_family` must have the network that they belong to."""
    if (identity is not None) != isinstance(local_family, Amortized):
        found = "an amortized local family; give local_family=families.amortized(...) as in the fit."
        if identity is None:
            found = "no amortized local family; leave local_family out."
        raise ArchiveError(f"{str(path)!r} was made with {found}")
    if identity is None:
        return None
    network = archive.unflatten(local_family.initial(), arrays, prefix="network", path=path)
    if not same_network(local_family, identity):
        raise ArchiveError(
            f"{str(path)!r} was made with an inference network that computes something else than that of local_family, "
            "or with another version of jax; give the families.amortized(...) of the fit."
        )
    return network


def _name_dims(draws, from_plates, from_user):
    """Names for all dimensions of each site: plates', then the user's for the rest in order."""
    dims = {}
    for name in draws:
        given = iter(from_user.get(name, []))
        axes = enumerate(from_plates[name])
        dims[name] = [plate or next(given, f"{name}_dim_{axis}") for axis, plate in axes]
    return dims


def _usable_coords(draws, dims, coords):
    """Those of the user's labels that fit the number of members."""
    usable = {}
    for name, names in dims.items():
        for axis, dim in enumerate(names):
            if dim in coords and len(coords[dim]) == draws[name].shape[axis + 1]:
                usable[dim] = coords[dim]
    return usable


def _inference_data(draws, dims, coords):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # ArviZ announces its next major version at import
        import arviz
    posterior = {name: np.asarray(values)[None] for name, values in draws.items()}
    return arviz.from_dict(posterior, coords=_usable_coords(draws, dims, coords), dims=dims)


def _summarize(draws, dims, coords, quantiles):
    usable = _usable_coords(draws, dims, coords)
    rows = {}
    for name, values in draws.items():
        values = np.asarray(values, np.float64)
        labels = [
            [str(label) for label in usable.get(dim, range(size))]
            for dim, size in zip(dims[name], values.shape[1:], strict=True)
        ]
        for index in np.ndindex(values.shape[1:]):
            label = ", ".join(labels[axis][i] for axis, i in enumerate(index))
            column = values[(slice(None), *index)]
            rows[f"{name}[{label}]" if index else name] = [
                column.mean(),
                column.std(ddof=1),
                *np.quantile(column, quantiles),
            ]
    columns = ["mean", "sd", *(f"{100 * q:g}%" for q in quantiles)]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns)


def _flatten_theta(theta, *, prefix):
    leaves = jax.tree.flatten_with_path(theta)[0]
    arrays = {f"{prefix}.{position}": leaf for position, (_, leaf) in enumerate(leaves)}
    return arrays, [[entry.key for entry in path] for path, _ in leaves]


def _unflatten_theta(arrays, paths, *, prefix):
    theta: dict = {}
    for position, path in enumerate(paths):
        branch = theta
        for entry in path[:-1]:
            branch = branch.setdefault(entry, {})
        branch[path[-1]] = jnp.asarray(arrays[f"{prefix}.{position}"])
    return theta


def _read_family(arrays, header, path):
    """A Gaussian is its arrays; a flow is built again from its settings and filled."""
    if "flow" in header:
        start = jnp.zeros(arrays["family.loc"].shape)
        return archive.unflatten(families.flow(**header["flow"])(start, 1.0), arrays, prefix="family", path=path)
    fields = {name[len("family.") :]: jnp.asarray(a) for name, a in arrays.items() if name.startswith("family.")}
    return GLOBAL_FAMILIES[header["family"]](**fields)


def _flatten_local(family):
    """Arrays of a silo's family; plates by number, since their names may hold anything."""
    parts = {"local.silo": family.silo} | {f"local.{i}": family.units[p] for i, p in enumerate(sorted(family.units))}
    arrays = {}
    for prefix, block in parts.items():
        arrays |= archive.flatten(block, prefix=prefix)
    return arrays


def _read_local(arrays, plates):
    def read(prefix):
        fields = ("loc", "log_scale", "lower", "coupling", "scale_coupling")
        found = {field: arrays.get(f"{prefix}.{field}") for field in fields}
        leaves: dict[str, Any] = {f: None if a is None else jnp.asarray(a) for f, a in found.items()}
        return BlockGaussian(**leaves)

    own = read("local.silo") if "local.silo.loc" in arrays else None
    return StructuredLocal(own, {plate: read(f"local.{i}") for i, plate in enumerate(plates)})
