"""The posterior of what is shared."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import pandas as pd
from jaxtyping import Array, Float

from .. import archive, families
from .._random import as_key
from .._types import Key, Theta
from ..bounds import Bound
from ..diagnostics.evidence import Evidence
from ..diagnostics.importance import ImportanceCheck, check_importance
from ..errors import ArchiveError, OptionError
from ..export import QUANTILES, Draws, Group, axis_labels, inference_data, name_dims, summarize
from ..families import AbstractGlobalFamily, NormalizingFlow
from ..model import StructuredModel
from ..objectives import Shared
from .files import flatten_theta, read_family, read_network, unflatten_theta

if TYPE_CHECKING:
    import arviz

GLOBAL_KIND = "global posterior"


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
        self._compiled: dict[Any, Any] = {}

    def compiled(self, what: Any, make: Callable[[], Any]) -> Any:
        """A compiled function of this posterior and its silos': made once, kept as long as the posterior.

        Args:
            what: Tells it from others.
            make: Makes it.
        """
        if what not in self._compiled:
            self._compiled[what] = make()
        return self._compiled[what]

    @property
    def family(self) -> AbstractGlobalFamily:
        """$q(z_G)$ in unconstrained space."""
        return self.shared.family

    def __repr__(self) -> str:
        sites = ", ".join(site.name for site in self.model.population.layout.sites)
        return f"<GlobalPosterior of {sites}: {type(self.family).__name__}>"

    def noise(self, key: Key | int, num_samples: int) -> Float[Array, "samples n_noise"]:
        r"""The standard normals that `sample` makes draws of."""
        if isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 1:
            raise OptionError(f"num_samples is {num_samples!r}; give a whole number of at least 1.")
        return jax.random.normal(as_key(key), (num_samples, self.family.noise_size), self.family.center.dtype)

    def sample(self, key: Key | int = 0, num_samples: int = 1000) -> Draws:
        """Draw global latents and deterministic sites; draws are on the first axis."""
        population = self.model.population

        def draw(family, theta, noise):
            return population.outputs(family.sample(noise), theta)

        drawing = self.compiled("sample", lambda: jax.jit(jax.vmap(draw, (None, None, 0))))
        return drawing(self.family, self.shared.theta, self.noise(key, num_samples))

    def summary(
        self, *, num_samples: int = 10_000, quantiles: Sequence[float] = QUANTILES, key: Key | int = 0
    ) -> pd.DataFrame:
        """Mean, sd and quantiles of every coordinate, from draws; a row is named `beta[smoke]`."""
        return self.summarize(self.sample(key, num_samples), quantiles)

    def summarize(self, draws: Draws, quantiles: Sequence[float] = QUANTILES) -> pd.DataFrame:
        """The same of given draws, like those that `ImportanceCheck.resample` returns."""
        return summarize(draws, self._dims(draws), self.model.coords, quantiles)

    def labels(self, draws: Draws) -> dict[str, list[list[str]]]:
        """For each site of some draws the labels along its axes."""
        return axis_labels(draws, self._dims(draws), self.model.coords)

    def to_arviz(
        self, *, num_samples: int = 1000, key: Key | int = 0, importance: ImportanceCheck | None = None
    ) -> "arviz.InferenceData":
        r"""Export draws as one chain of the groups `posterior` and `sample_stats`.

        `sample_stats` has $\log q(z_G)$ and $\log p(z_G)$ of the unconstrained latents.

        Args:
            num_samples: Draws.
            key: Of the draws, or with `importance` of their choice.
            importance: The check "importance": export draws corrected by its weights; its k-hat is an attribute.
        """
        if importance is None:
            draws, stats = self.sample(key, num_samples), self._densities(key, num_samples)
        else:
            chosen = importance.choose(num_samples, key=key)
            whole = self.sample(importance.key, len(importance.weights))
            densities = self._densities(importance.key, len(importance.weights))
            draws, stats = jax.tree.map(lambda leaf: leaf[chosen], (whole, densities))
        groups = {
            "posterior": Group(draws, self._dims(draws)),
            "sample_stats": Group(stats, {site: [] for site in stats}),
        }
        found = inference_data(groups, self.model.coords)
        if importance is not None:
            found["posterior"].attrs["pareto_k_hat"] = importance.k_hat
        return found

    def check_importance(self, evidence: Mapping[str, Evidence], *, key: Key | int = 0) -> ImportanceCheck:
        """Weigh draws with what the silos say of them: `fit.diagnose()` where the silos are elsewhere.

        Args:
            evidence: What `SiloPosterior.evidence` returned in each silo, with the same key and number of draws.
            key: Of the draws.
        """
        return check_importance(self, evidence, key=key)

    def _densities(self, key, num_samples):
        population = self.model.population

        @jax.jit
        def both(shared, noise):
            z_global = shared.family.sample(noise)
            return shared.family.log_prob(z_global), population.log_prob(z_global, shared.theta)

        log_q, log_prior = jax.vmap(both, (None, 0))(self.shared, self.noise(key, num_samples))
        return {"log_q": log_q, "log_prior": log_prior}

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
        return name_dims(self.model.population.dims(self.shared.theta), self.model.dims, list(draws))

    def _contents(self):
        free, paths = flatten_theta(self.shared.theta, prefix="free_theta")
        own, _ = flatten_theta(self.theta, prefix="theta")
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
        family = read_family(arrays, header, path)
        free, theta = (unflatten_theta(arrays, header["theta"], prefix=p) for p in ("free_theta", "theta"))
        network = read_network(arrays, header["network"], local_family, path)
        shared, bound = Shared(family, free, network), Bound(*header["bound"])
        return cls(model, shared, theta, local_family or families.block(), bound, header["network"])
