"""The posterior of one silo's latents, which stays with it."""

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from .. import archive
from .._compile import on_one_thread
from .._random import as_key
from .._types import Key
from ..algorithms import SFVI, Elbo
from ..diagnostics.evidence import Evidence, evidence
from ..diagnostics.predictive import check_predictive
from ..diagnostics.units import check_units
from ..diagnostics.verdicts import Check, Diagnosis
from ..errors import ArchiveError, OptionError
from ..export import QUANTILES, Draws, Group, axis_labels, inference_data, name_dims, summarize
from ..families import AmortizedBlock, Local, StructuredLocal
from ..model import SiloData, StructuredModel
from ..model.observed import log_joint_by_unit, log_likelihood, observations, replicate
from ..network_identity import inputs_identity
from ..prediction import check_alike, check_sites, draw_latents, posterior_means
from ..report import silo_report, write
from .files import flatten_local, read_local
from .of_globals import GlobalPosterior

if TYPE_CHECKING:
    import arviz

SILO_KIND = "silo posterior"
DRAWS_AT_A_TIME = 50  # of a silo's latents; the rest waits, so that memory does not grow with their number
GROUPS = ("posterior", "sample_stats", "posterior_predictive", "log_likelihood", "observed_data")


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
        return self._at_draws(_outputs, key, num_samples)

    def summary(
        self, *, num_samples: int = 2000, quantiles: Sequence[float] = QUANTILES, key: Key | int = 0
    ) -> pd.DataFrame:
        """Mean, sd and quantiles of every coordinate of the silo's own sites, from draws."""
        draws = self.sample(key, num_samples)
        own = {name: draws[name] for name in self._own_dims()}
        return summarize(own, self._dims(own), self.shared.model.coords, quantiles)

    def labels(self, draws: Draws) -> dict[str, list[list[str]]]:
        """For each of the silo's own sites in some draws the labels along its axes."""
        own = {name: draws[name] for name in self._own_dims() if name in draws}
        return axis_labels(own, self._dims(own), self.shared.model.coords)

    def to_arviz(
        self, *, num_samples: int = 1000, key: Key | int = 0, groups: Sequence[str] = GROUPS
    ) -> "arviz.InferenceData":
        r"""Export draws, local and global, as one chain, with what ArviZ's plots and statistics ask for.

        It holds the silo's data and belongs to it. `sample_stats` has `lp`, $\log p(z_G, z_L, y_j)$, unconstrained.

        Args:
            num_samples: Draws.
            key: Of the draws.
            groups: Some of posterior, sample_stats, posterior_predictive, log_likelihood and observed_data; by default
                all.
        """
        unknown = [group for group in groups if group not in GROUPS]
        if unknown or isinstance(groups, str):
            odd = groups if isinstance(groups, str) else unknown[0]
            raise OptionError(f"to_arviz: groups holds {odd!r}; give a list of some of {', '.join(GROUPS)}.")
        seen, user = observations(self.data, self.shared.shared.theta), self.shared.model.dims
        dims = name_dims({site: o.dims for site, o in seen.items()}, user, list(seen))
        found = {}
        for group in groups:
            if group == "posterior":
                draws = self.sample(key, num_samples)
                found[group] = Group(draws, self._dims(draws))
            elif group == "observed_data":
                found[group] = Group({site: o.value for site, o in seen.items()}, dims, drawn=False)
            elif group == "posterior_predictive":
                found[group] = Group(self._at_draws(_replicate, key, num_samples), dims)
            elif group == "log_likelihood":
                values = self._at_draws(_log_likelihood, key, num_samples)
                found[group] = Group(values, {s: dims[s][: len(o.likelihood_dims)] for s, o in seen.items()})
            else:
                found[group] = Group(self._at_draws(_log_joint, key, num_samples), {"lp": []})
        return inference_data(found, self.shared.model.coords)

    def evidence(self, *, num_samples: int = 1000, num_draws: int = 64, key: Key | int = 0) -> Evidence:
        r"""What the server needs from this silo for the check "importance" of $q(z_G)$.

        $\log p_\theta(y_j \mid z_G)$ at `num_samples` draws of $z_G$, the silo's latents integrated out. These numbers
        leave the silo when they are sent, and say how well its data agree with each draw.

        Args:
            num_samples: Draws of the global latents, the same in all silos.
            num_draws: Draws of each unit's latents, and of those of the silo as a whole; a power of two.
            key: Of the draws, the same in all silos.
        """
        if (
            isinstance(num_draws, bool)
            or not isinstance(num_draws, int)
            or num_draws < 2
            or num_draws & (num_draws - 1)
        ):
            raise OptionError(f"num_draws is {num_draws!r}; give a power of two, as 64.")
        own_key = jax.random.fold_in(as_key(key), self.data.silo_word)
        noise = self.shared.noise(key, num_samples)
        return evidence(own_key, self.shared.shared, self.family, self.data, noise, num_draws=num_draws)

    def diagnose(self, *, num_samples: int = 1000, key: Key | int = 0) -> Diagnosis:
        """Check the posteriors of this silo's units, and whether the model could have made its data.

        The result says something of single units and of the data, so it belongs to the silo.

        Args:
            num_samples: Replicated data sets.
            key: Of all draws.
        """
        checks: list[Check] = [check_predictive(self, key=key, num_samples=num_samples)]
        units, notes = check_units(self, key=key), []
        if units is not None:
            checks.insert(0, units)
        elif self.data.program.layout.groups:
            notes.append(f"units: not checked, since {self._why_not_apart()}.")
        return Diagnosis(tuple(checks), tuple(notes))

    def report(
        self,
        path: str | os.PathLike,
        *,
        diagnosis: Diagnosis | Literal[False] | None = None,
        global_diagnosis: Diagnosis | None = None,
    ) -> None:
        """Write the silo's report: one HTML file with its posterior, diagnosis and data summary. It stays in the silo.

        Args:
            path: The file.
            diagnosis: What `diagnose()` returned; by default it is made now. False for none.
            global_diagnosis: What `Fit.diagnose()` returned at the server, to be shown here too: a silo's posterior is
                no better than the global one. It is not made here.
        """
        if diagnosis is None:
            diagnosis = self.diagnose()
        write(path, silo_report(self, None if diagnosis is False else diagnosis, global_diagnosis))

    def _at_draws(self, function, key, num_samples):
        """A function of (key, shared, data, z_G, z_L) at draws of all latents; the same key, the same draws.

        What is compiled for a function is kept with the global posterior, for other calls and silos of the same shapes.
        """
        global_key, local_key = jax.random.split(as_key(key))
        noise = self.shared.noise(global_key, num_samples)
        keys = jax.random.split(local_key, num_samples)
        num_draws = self.shared.bound.draws_of_units

        def run(shared, local, data, noise, keys):
            def one(inputs):
                noise, key = inputs
                drawn = draw_latents(key, shared, local, data, noise, num_draws=num_draws)
                return function(jax.random.fold_in(key, 1), shared, data, *drawn)

            return jax.lax.map(one, (noise, keys), batch_size=DRAWS_AT_A_TIME)

        return self.shared.compiled(function, lambda: on_one_thread(run))(
            self.shared.shared, self.family, self.data, noise, keys
        )

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
        arrays |= flatten_local(self.free)
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
        free = read_local(arrays, header["plates"])
        elbo = Elbo(SFVI(local_family=shared.local_family), model)
        family = elbo.local(shared.shared, free, silo)
        return cls(header["silo"], shared, family, silo, header["program of"])

    @property
    def free(self) -> StructuredLocal:
        """The part of the family that has parameters of its own in the silo: all that is not amortized."""
        amortized = [plate for plate, block in self.family.units.items() if isinstance(block, AmortizedBlock)]
        units = {plate: block for plate, block in self.family.units.items() if plate not in amortized}
        return StructuredLocal(self.family.silo, units)

    def _why_not_apart(self):
        layout = self.data.program.layout
        units = {group.plate.name for group in layout.groups}
        rows = [plate.name for plate in layout.subsampled if plate.name not in units]
        if rows:
            return f"plate {rows[0]!r} is subsampled, so a unit's weight would be of some of its rows only"
        return "some rows depend on the latents of several"

    def _own_dims(self):
        return self.data.program.dims(self._zeros(), self.shared.shared.theta, self.data)

    def _zeros(self):
        layout, dtype = self.data.program.layout, self.shared.family.center.dtype
        own = jnp.zeros((layout.own.size, 1), dtype) if layout.own.size else None
        return Local(own, {g.plate.name: jnp.zeros((g.block, g.plate.size), dtype) for g in layout.groups})

    def _dims(self, draws):
        model = self.shared.model
        known = model.population.dims(self.shared.shared.theta) | self._own_dims()
        return name_dims(known, model.dims, list(draws))


def _outputs(key, shared, data, z_global, z_local):
    del key
    drawn = data.program.population.outputs(z_global, shared.theta)
    return drawn | data.program.outputs(z_global, z_local, shared.theta, data)


def _replicate(key, shared, data, z_global, z_local):
    return replicate(key, data, z_global, z_local, shared.theta)


def _log_likelihood(key, shared, data, z_global, z_local):
    del key
    return log_likelihood(data, z_global, z_local, shared.theta)


def _log_joint(key, shared, data, z_global, z_local):
    del key
    rest, units = log_joint_by_unit(data, z_global, z_local, shared.theta)
    prior = data.program.population.log_prob(z_global, shared.theta)
    return {"lp": prior + rest + sum(jnp.sum(values) for values in units.values())}
