"""The front end: two ordinary NumPyro programs make a structured model."""

import inspect as python_inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from numpyro import handlers

from .._types import Key, Theta
from ..errors import DataError, ModelError, OptionError
from .apart import Apart, ways_apart
from .centring import DEFAULT, check_centring
from .choosing import choose
from .intake import array_leaves, check_theta, check_values, count_units, describe, identify, text_columns
from .layout import FlatLayout, group_units
from .owners import attribute, loose_sites
from .programs import PopulationProgram, SiloData, SiloProgram
from .tracing import Structure, constrained_params, initial_params, inspect
from .wording import Wording, free_labels


class StructuredModel:
    r"""A hierarchical model over silos whose data may not be pooled.

    $$z_G \sim p_\theta(z_G), \qquad z_{Lj} \mid z_G \sim p_\theta(z_{Lj} \mid z_G), \qquad
      y_j \sim p_\theta(y_j \mid z_{Lj}, z_G)$$

    Sample sites of `population` are the global latents $z_G$; unobserved sample sites of `silo` are that
    silo's local latents $z_{Lj}$; `numpyro.param` sites of either are the trainable $\theta$. The members of
    a plate in the silo program (children, documents) are its units: their latents are taken as independent
    of each other given $z_G$. A plate's `subsample_size` makes minibatches.

    Args:
        population: Takes nothing, samples the global latents, and returns what the silo program needs.
        silo: Takes what `population` returned and one silo's data; samples the local latents and observes.
            One program for all silos, or a mapping with one per silo name.
        dims: Names for a site's dimensions beyond its plates, as in ArviZ.
        coords: Labels along those dimensions and along plates.
        centring: By what local sites with a location and a scale are measured inside $q$ (Normal, StudentT, Laplace,
            SoftLaplace, Cauchy, Logistic, Gumbel, also expanded or in an event): "as_written"; "non_centred", minus
            their location and divided by their scale; "learned", something between, which all silos learn together
            as `fit.theta["<site>_centered"]`, 0 for non-centred and 1 for as written; "auto", that is "learned" for
            sites whose location or scale depends on a latent or a parameter. For single sites give a mapping from
            site to one of these or to a number; the others follow the default. Results are always of the site
            itself. Other sites, and those inside a `scan` or scaled by a handler, stay as written.
        check: Takes one silo's data, as arrays, before the program sees them, and raises a ValueError with a sentence
            if their values cannot be right. (Programs are traced: they see shapes and types only. Values of observed
            sites are held against the support of their distribution anyway.)

    Example:
        ```python
        def population():
            return numpyro.sample("mu", dist.Normal(0, 10))

        def silo(mu, data):
            with numpyro.plate("patients", len(data["y"])):
                numpyro.sample("y", dist.Normal(mu, 1), obs=data["y"])

        model = sfvi.StructuredModel(population, silo)
        ```
    """

    def __init__(
        self,
        population: Callable[[], Any],
        silo: Callable[[Any, Any], Any] | Mapping[str, Callable[[Any, Any], Any]],
        *,
        dims: Mapping[str, list[str]] | None = None,
        coords: Mapping[str, Any] | None = None,
        centring: str | Mapping[str, str | float] = DEFAULT,
        check: Callable[[Any], None] | None = None,
    ):
        if not callable(population) or not (callable(silo) or isinstance(silo, Mapping)):
            raise ModelError("StructuredModel takes two NumPyro programs (functions), or a mapping of silo programs.")
        if not (check is None or callable(check)):
            raise ModelError(f"StructuredModel: check is {check!r}; give a function that takes a silo's data.")
        _check_no_arguments(population)
        self.dims = dict(dims or {})
        self.coords = dict(coords or {})
        self.wording = Wording()  # a front end that writes the programs has its own
        self.centring = check_centring(centring)
        self.check = check
        self._silo = silo
        self._structure = inspect(population, (), what="The population program")
        _check_population(self._structure)
        self.population = PopulationProgram(population, FlatLayout(self._structure.latents))
        self._cache: dict[Any, tuple[SiloProgram, Structure]] = {}

    def silo_data(
        self,
        name: str,
        data: Any,
        *,
        unit_ids: Any = None,
        num_units: float | None = None,
        program: str | None = None,
    ) -> SiloData:
        """Check one silo's data and bind them to its program.

        Args:
            name: The silo's name.
            data: A tree of arrays, as the silo program expects them; or a data frame, of which it gets a dict of the
                columns that hold numbers.
            unit_ids: Whole numbers that identify the units whichever silo holds them, so that their noise,
                and with it the whole fit, does not depend on the split. One array if there is one plate
                of units, else a mapping from plate to array.
            num_units: How many exchangeable units the silo stands for, where algorithms weight silos by it. By default
                the members of the plate with the local latents, or 1 if the silo as a whole has latents.
            program: Where every silo has a program of its own, the silo whose program to use; by default its own.
        """
        values, rebuild, signature = array_leaves(name, data)
        if self.check is not None:
            check_values(name, self.check, rebuild(values))
        function = self._silo_function(name, program)
        try:
            bound = self._program(name, function, values, rebuild, signature)[0]
        except ModelError as error:
            asked = error.__cause__.args[0] if isinstance(error.__cause__, KeyError) else None
            if asked not in text_columns(data):
                raise
            raise DataError(
                f"Silo {name!r}: the program asks for column {asked!r}, which holds text; turn it into numbers (codes "
                "for categories)."
            ) from error
        units = count_units(name, num_units, bound.layout)
        silo = SiloData(values, {}, identify(name, unit_ids, bound.layout), units, bound)
        return attribute(silo, self.initial_theta(jax.random.key(0), {name: silo})) if bound.loose else silo

    def labels(self) -> list[str]:
        """Names of all coordinates of the unconstrained global latents, like `beta[smoke]`."""
        return free_labels(self.population.layout, self.dims, self.coords, self.wording)

    @property
    def silo_program(self) -> Callable[[Any, Any], Any] | Mapping[str, Callable[[Any, Any], Any]]:
        """The silo program as it was given, or the mapping of them."""
        return self._silo

    def as_one_program(self, silos: Mapping[str, Any]) -> Callable[[], None]:
        """An ordinary NumPyro program of all silos at once, for who holds all their data: to compare with NUTS, say.

        Args:
            silos: Data by silo name. A silo's own sites are named `silo/site`, global sites and parameters as they are.
        """
        parts = {}
        for name, data in silos.items():
            values, rebuild, _ = array_leaves(name, data)
            parts[name] = (self._silo_function(name, None), rebuild(values))

        def program():
            globals_ = self.population.program()
            for name, (silo, data) in parts.items():
                with handlers.scope(prefix=name, hide_types=["param"]):
                    silo(globals_, data)

        return program

    def at_shapes(self, name: str, silo: SiloData, values: dict) -> SiloProgram:
        """The program of a silo at other data shapes: its units padded, or laid beside those of other silos."""
        program = silo.program
        return self._program(name, program.program, values, program.rebuild, program.signature)[0]

    def ways_apart(self, name: str, silo: SiloData) -> Iterator[Apart]:
        """Ways to take the units of a silo one by one that fit the shapes of its data, see `apart.py`."""
        structure = self._structure_of(silo)
        observed = set(structure.observed + structure.factors) - set(self._structure.frames)
        return ways_apart(self, name, silo, {site: structure.frames[site] for site in sorted(observed)})

    def initial_theta(self, key: Key, silos: Mapping[str, SiloData]) -> Theta:
        r"""Initial $\theta$ in unconstrained space: the parameters of both programs, agreed by all silos."""
        theta = initial_params(self.population.program, key, ())
        owner = dict.fromkeys(theta, "the population program")
        for name, silo, args in self._parametrized(silos, theta):
            for param, value in initial_params(silo.program.recentred, key, args).items():
                known = theta.setdefault(param, value)
                owner.setdefault(param, f"silo {name!r}")
                if describe(known) != describe(value):
                    raise ModelError(
                        f"The parameter {param!r} is {describe(known)} in {owner[param]} and "
                        f"{describe(value)} in silo {name!r}; theta is shared and must agree."
                    )
        check_theta(theta)
        return theta

    def constrain_theta(self, theta: Theta, silos: Mapping[str, SiloData]) -> Theta:
        r"""Map $\theta$ from unconstrained space to the model's own."""
        constrained = constrained_params(self.population.program, (), theta)
        for _, silo, args in self._parametrized(silos, theta):
            constrained |= constrained_params(silo.program.recentred, args, theta)
        return constrained

    def _parametrized(self, silos, theta):
        """One silo of every program that has parameters, with the program's arguments."""
        zeros = jnp.zeros(self.population.layout.size)
        for name, silo in _one_per_program(silos).items():
            if self._structure_of(silo).params:
                globals_, _ = self.population.run(zeros, theta)
                yield name, silo, (globals_, silo.program.rebuild(silo.values))

    def _structure_of(self, silo):
        return next(s for program, s in self._cache.values() if program is silo.program)

    def _program(self, name, fn, values, rebuild, signature):
        shapes = tuple((leaf, value.shape, value.dtype) for leaf, value in values.items())
        key = (id(fn), signature, shapes)  # functions may be unhashable; the program keeps this one alive
        if key not in self._cache:
            self._cache[key] = self._traced(name, fn, values, rebuild, signature)
        return self._cache[key]

    def _traced(self, name, fn, values, rebuild, signature):
        def both(values):
            return fn(self.population.program(), rebuild(values))

        what = f"The program of silo {name!r}"
        structure = inspect(both, (values,), what=what)
        shared = {site.name for site in self._structure.latents}
        latents = tuple(site for site in structure.latents if site.name not in shared)
        if not structure.observed and not set(structure.factors) - set(self._structure.factors):
            raise ModelError(f"{what} observes nothing; condition a site on its data with obs=.")
        own_frames = [frames for site, frames in structure.frames.items() if site not in self._structure.frames]
        used = set().union(*own_frames)
        layout = group_units(latents, [plate for plate in structure.plates if plate.name in used])
        centred = choose(self.centring, both, (values,), structure, latents, what=what)
        loose = loose_sites(both, (values,), structure, layout, self._structure.frames)
        program = SiloProgram(fn, self.population, layout, rebuild, signature, centred, loose)
        return program, structure._replace(params=structure.params + program.learned)

    def _silo_function(self, name, program):
        if not isinstance(self._silo, Mapping):
            if program is not None:
                raise OptionError(
                    f"program is {program!r} for silo {name!r}, but the model has one program for all silos; leave it "
                    "out."
                )
            return self._silo
        known = ", ".join(map(repr, self._silo))
        if program is not None and program not in self._silo:
            raise OptionError(f"program is {program!r} for silo {name!r}; choose one of {known}.")
        if program is None and name not in self._silo:
            raise ModelError(
                f"There is no program for silo {name!r}, the model has those of {known}; add one, or let fit_silo use "
                "another silo's with program=."
            )
        return self._silo[name if program is None else program]


def _check_no_arguments(population):
    for parameter in python_inspect.signature(population).parameters.values():
        required = parameter.default is parameter.empty
        if required and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ModelError(
                f"The population program asks for {parameter.name!r}, but it runs at the server, where there "
                "are no data and no local latents; move the sites that need it to the silo program."
            )


def _check_population(structure):
    if structure.observed:
        raise ModelError(
            f"The population program observes {structure.observed[0]!r}; observations belong to the silo "
            "program, the server has no data."
        )
    for plate in structure.plates:
        if plate.drawn < plate.size:
            raise ModelError(
                f"The population program subsamples plate {plate.name!r}; global latents are always "
                "all updated: drop subsample_size there."
            )


def _one_per_program(silos):
    seen = {}
    for name, silo in silos.items():
        seen.setdefault(silo.program, (name, silo))
    return dict(seen.values())
