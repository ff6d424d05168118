"""What is checked of silos and options before a run, and by what a run is known again."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ._types import Key, Theta
from .algorithms import SiloPrivacy, Spent
from .algorithms.elbo import Elbo
from .algorithms.local_params import check_network, network_inputs
from .algorithms.participation import Everyone, Sampled
from .algorithms.privacy import DROWNED, noise_in_words
from .algorithms.under_noise import noise_left
from .bounds import Bound, elbo, locally_enhanced
from .engines.batching import unit_counts
from .errors import DataError, ModelError, OptionError
from .families import Amortized, NormalizingFlow
from .model import SiloData, StructuredModel
from .network_identity import inputs_identity, network_identity

MANY = 10_000_000  # numbers of q
LITTLE_PROMISE = 20.0  # epsilon; e^20 is 500 million
FEW_SILOS = 50
TRIED_ROUNDS = 100  # a rule of participation is tried on so many rounds before the first


def check_support(theta, data, batches):
    """Refuse observations that their distribution cannot produce; silo by silo only if a batch has any."""

    @eqx.filter_jit
    def count(silo):
        return silo.program.violations(theta, silo)

    for batch in batches:
        found = eqx.filter_vmap(count)(batch.data) if batch.stacked else count(batch.data)
        if not any(bool(jnp.any(number > 0)) for number in found.values()):
            continue
        for name in batch.names:
            for site, number in count(data[name]).items():
                if number > 0:
                    raise DataError(
                        f"Silo {name!r}: the observed site {site!r} has {int(number)} values that its distribution "
                        "cannot produce; check the coding of the data, or choose another distribution."
                    )


def check_participation(participation, key, names, num_rounds):
    """Try a user's rule on the first rounds: it must repeat itself, and give every silo that comes a probability."""
    if isinstance(participation, Everyone | Sampled):
        return
    for number in range(min(TRIED_ROUNDS, num_rounds)):
        at = jnp.asarray(number, jnp.int32)
        first, again = (jax.tree.map(np.asarray, participation.draw(key, at, len(names))) for _ in range(2))
        if not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(first, again, strict=True)):
            raise OptionError(
                f"The participation rule gives two answers for round {number} and the same key; all its randomness "
                "must come from the key (jax.random, not numpy.random)."
            )
        check_weights(first, number, names)


def remarks_on_privacy(options: Any, family: Any, *, num_silos: int, num_rounds: int) -> list[str]:
    """What should be known of a run's differential privacy before its first round, a sentence each.

    Args:
        options: The algorithm's, as planned for this run.
        family: $q(z_G)$; None if it is not known what noise does to it.
        num_silos: J.
        num_rounds: T.
    """
    privacy = options.privacy
    if privacy is None or privacy.noise == 0:  # nothing is promised
        return []
    found = [_remark_on_noise(options, family, num_silos=num_silos, num_rounds=num_rounds)]
    if isinstance(privacy, SiloPrivacy) and num_silos < FEW_SILOS:
        found.append(
            f"privacy: Noise that hides a whole silo drowns the answer where there are as few as {num_silos} silos; "
            f"have {FEW_SILOS} or more, or protect units (UnitPrivacy)."
        )
    epsilon = Spent.of(privacy, num_rounds).epsilon
    if epsilon > LITTLE_PROMISE:
        found.append(
            f"privacy: An epsilon of {epsilon:.3g} promises next to nothing, as any above about {LITTLE_PROMISE:g}; "
            "spend less of it, that is, have more noise."
        )
    return [sentence for sentence in found if sentence is not None]


def _remark_on_noise(options, family, *, num_silos, num_rounds):
    """A sentence if noise will leave more in the means than the posterior's own uncertainty; see `noise_left`."""
    left = noise_left(options, family, num_silos=num_silos, num_rounds=num_rounds)
    if left is None or left <= DROWNED:
        return None
    said = f"privacy: {noise_in_words(left)} Spend more epsilon, draw more units (sampling_rate), or have more of them"
    if options.privacy.shared_by < num_silos:
        said += ", or let silos without latents of their own make the noise together (shared_by, with a secure sum)"
    return f"{said}: with more units the clip may be smaller."


def remark_on_size(elbo: Elbo, key: Key, theta: Theta, data: Mapping[str, SiloData]) -> str | None:
    """A sentence if q has very many numbers for its latents: a full covariance, or units that follow many globals."""
    family = eqx.filter_eval_shape(elbo.start_shared, key, theta).family
    locals_ = [eqx.filter_eval_shape(elbo.start_local, silo) for silo in data.values()]
    layouts = [silo.program.layout for silo in data.values()]
    units = sum(group.block * group.plate.size for layout in layouts for group in layout.groups)
    latents = elbo.model.population.layout.size + units + sum(layout.own.size for layout in layouts)
    of_globals, of_silos = _count(family), _count(locals_)
    if of_globals + of_silos <= MANY or of_globals + of_silos <= 20 * latents:
        return None
    return (
        f"q has {of_globals + of_silos:,} numbers for {latents:,} latents, {of_globals:,} of them for those that silos "
        f"share and {of_silos:,} for silos' own: it will need much memory and time. Few numbers have "
        "global_family=families.mean_field() and local_family=families.block(coupling='none')."
    )


def _count(tree):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree) if hasattr(leaf, "shape"))


def check_weights(drawn, number, names):
    """Refuse participants of a round whose weight says that their probability is impossible."""
    impossible = ~np.isfinite(np.asarray(drawn.weight))
    if impossible.any():
        silo = sorted(names)[int(np.asarray(drawn.index)[impossible][0])]
        raise OptionError(
            f"The participation rule lets silo {silo!r} take part in round {number} with a probability that is not in "
            "(0, 1]; give that with which it really comes."
        )


def check_networks(options, data):
    """Refuse an inference network, or inputs of it, that do not fit the silos' data."""
    chosen = options.local_family
    if not isinstance(chosen, Amortized):
        return
    served = {name: silo for name, silo in data.items() if check_network_of(options, name, silo)}
    if not served:
        plates = sorted({group.plate.name for silo in data.values() for group in silo.program.layout.groups})
        raise OptionError(f"amortized: no silo has the plate {chosen.plate!r} of units; there are {plates}.")
    groups: dict = {}
    for name, silo in served.items():
        groups.setdefault((id(silo.program.program), tuple(silo.values)), {})[name] = silo
    for group in groups.values():
        _check_units_apart(options, group)


def check_network_of(options, name, silo):
    """Refuse what cannot be used in one silo; returns whether a network serves it."""
    who = f"silo {name!r}"
    inputs = network_inputs(options, silo, {}, who)
    if inputs is None:
        return False
    if not all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(inputs.values)):
        raise DataError(
            f"amortized: inputs returns non-finite numbers for {who}; check what it computes of the data (logarithms, "
            "divisions by zero)."
        )
    check_network(options, inputs, silo, who)
    return True


def _check_units_apart(options, silos):
    """Change every other unit's data in one of the silos: the network must see the same of the units between them."""
    name, silo = max(silos.items(), key=lambda item: sum(unit_counts(item[1]).values()))
    before = network_inputs(options, silo, {})
    assert before is not None
    units = unit_counts(silo)[before.plate]
    leaves = _leaves_of_units(before.plate, list(silos.values()))
    even = np.arange(units) % 2 == 0
    for moved in (even, ~even):
        for sign in (1.0, -1.0):
            changed = {leaf: _moved(silo.values[leaf], moved, sign * units) for leaf in leaves}
            after = network_inputs(options, dataclasses.replace(silo, values=silo.values | changed), {})
            assert after is not None
            for one, other in zip(*map(jax.tree.leaves, (before.values, after.values)), strict=True):
                if not _close(np.asarray(one)[~moved], np.asarray(other)[~moved]):
                    raise OptionError(
                        f"amortized: what inputs gives for a unit of silo {name!r} depends on other units; it must "
                        "treat every unit by itself (center or scale the data beforehand)."
                    )


def _leaves_of_units(plate, silos):
    """Names of the arrays with a row for each unit; not of those that only happen to have as many rows."""

    def by_unit(leaf):
        values = [silo.values[leaf] for silo in silos]
        if not all(v.ndim and v.shape[0] == unit_counts(s)[plate] for v, s in zip(values, silos, strict=True)):
            return False
        if len(silos) > 1:
            return not all(np.array_equal(values[0], other) for other in values[1:])
        return values[0].ndim > 1 or not any(len(values[0]) in other.shape[1:] for other in silos[0].values.values())

    return [leaf for leaf in silos[0].values if by_unit(leaf)]


def _moved(values, moved, factor):
    """Other values of some rows: far away, or where numbers are codes those of the row before."""
    rows = np.array(values)
    if np.issubdtype(rows.dtype, np.floating):
        rows[moved] += (factor * (1.0 + np.abs(rows).max())).astype(rows.dtype)
    else:
        rows[moved] = np.roll(rows, 1, axis=0)[moved]
    return jnp.asarray(rows)


def _close(one, other):
    return np.allclose(one, other, rtol=1e-5, atol=1e-6)


def check_batched_inputs(options, data, batches):
    """An inference network must see of a unit what it would see were the silo computed alone, in every batch."""
    if not isinstance(options.local_family, Amortized):
        return
    for batch in batches:
        start = 0
        for position, (name, sizes) in enumerate(zip(batch.names, batch.sizes, strict=True)):
            rows = jax.tree.map(lambda leaf, i=position: leaf[i], batch.data) if batch.stacked else batch.data
            together, alone = (network_inputs(options, silo, {}, f"silo {name!r}") for silo in (rows, data[name]))
            if together is None or alone is None:
                break
            window = slice(start, start + sizes[alone.plate])
            start += 0 if batch.stacked else sizes[alone.plate]
            for one, other in zip(jax.tree.leaves(alone.values), jax.tree.leaves(together.values), strict=True):
                if not _close(np.asarray(one), np.asarray(other)[window]):
                    raise OptionError(
                        f"amortized: inputs gives a unit of silo {name!r} other values beside other silos' units than "
                        "alone; it must treat every unit by itself (center or scale the data beforehand)."
                    )


def check_centred_sites(model: StructuredModel, data: Mapping[str, SiloData]) -> None:
    """Every site that `centring` names must be a local latent of some silo."""
    if isinstance(model.centring, str):
        return
    layouts = [silo.program.layout for silo in data.values()]
    known = {site.name for layout in layouts for site in layout.own.sites}
    known |= {site.name for layout in layouts for group in layout.groups for site in group.sites}
    for site in model.centring:
        if site not in known:
            found = ", ".join(map(repr, sorted(known))) or "none"
            raise ModelError(f"centring names {site!r}, which is no local latent of any silo; there are {found}.")


def settle_bound(options: Any, theta: Theta, data: Mapping[str, SiloData]) -> Any:
    """The options with a bound that these silos allow: the user's, or the best one."""
    asked = options.bound
    if asked is not None and asked.num_draws == 1:
        return options
    programs = {silo.program: (name, silo) for name, silo in data.items()}
    if asked is not None and asked.over == "everything":
        for program, (name, _) in programs.items():
            if program.layout.subsampled:
                raise OptionError(
                    f"Silo {name!r} subsamples plate {program.layout.subsampled[0].name!r}: minibatches bias the "
                    "importance-weighted bound; drop subsample_size, or use bounds.locally_enhanced()."
                )
            if program.learned:
                raise OptionError(
                    f"Silo {name!r} learns {program.learned[0]!r}, which the importance-weighted bound cannot; give "
                    "centring a number, or use bounds.locally_enhanced()."
                )
        return options
    if asked is None:
        groups, tangled = separation(theta, data)
        return dataclasses.replace(options, bound=best_bound(options, groups=groups, tangled=tangled))
    name = _tangled(theta, data)
    if name is not None:
        plates = " or ".join(repr(group.plate.name) for group in data[name].program.layout.groups)
        raise ModelError(
            f"The program of silo {name!r} does not separate by the members of plate {plates}: something depends "
            "on the latents of several units, or there are minibatches of something else than units; let each "
            "observation depend on one unit, inside its plate if there are minibatches, or use bound=bounds.elbo()."
        )
    return options


def separation(theta: Theta, data: Mapping[str, SiloData]) -> tuple[bool, bool]:
    """Whether any silo has units with latents, and if so whether those of any depend on each other."""
    groups = any(silo.program.layout.groups for silo in data.values())
    return groups, groups and _tangled(theta, data) is not None


def best_bound(options: Any, *, groups: bool, tangled: bool) -> Bound:
    """The bound that silos with such units allow."""
    good = groups and not tangled and not isinstance(options.local_family, Amortized)
    return locally_enhanced() if good else elbo()


def check_fixed_noise(options: Any, model: StructuredModel, data: Mapping[str, SiloData]) -> None:
    """Refuse what a fixed set of draws cannot carry: minibatches, families that bend around them, too few of them."""
    fixed = getattr(options, "fixed_noise", None)
    if fixed is None:
        return
    for name, silo in data.items():
        if silo.program.layout.subsampled:
            raise OptionError(
                f"fixed_noise: silo {name!r} subsamples plate {silo.program.layout.subsampled[0].name!r}, so that "
                "rounds differ; drop subsample_size or fixed_noise."
            )
    size = model.population.layout.size
    family = None if options.global_family is None else options.global_family(jnp.zeros(size), 1.0)
    if isinstance(family, NormalizingFlow):
        raise OptionError("fixed_noise: a flow would bend around the draws; choose a Gaussian global_family.")
    least = (2 * size + 2) * (2 if fixed.replicates else 1)  # replicates have half of them
    if fixed.num_samples < least:
        raise OptionError(
            f"FixedNoise: num_samples is {fixed.num_samples}, too few for {size} global latents: the posterior would "
            f"fit the draws; give at least {least}."
        )


def _tangled(theta, data):
    """The first silo whose units do not separate, or None: owners are each silo's, the rest is its program's."""
    tried = set()
    for name, silo in data.items():
        known = silo.program in tried
        if not (silo.attributed if known else silo.program.separates(theta, silo)):
            return name
        tried.add(silo.program)
    return None


def check_ids(data):
    """No unit, and no silo, may stand twice under the same words: their noise would be the same."""
    claims: dict[str, list] = {}
    for position, silo in enumerate(data.values()):
        parts = {"the silo": silo.ids.silo} | {f"plate {p!r}": ids for p, ids in silo.ids.units.items()}
        for what, ids in parts.items():
            words = np.asarray(ids).astype(np.uint64)
            claims.setdefault(what, []).append((words[0] << np.uint64(32) | words[1], position))
    names = list(data)
    for what, parts in claims.items():
        words = np.concatenate([words for words, _ in parts])
        owners = np.concatenate([np.full(len(words), position) for words, position in parts])
        order = np.argsort(words, kind="stable")
        again = np.flatnonzero(words[order][1:] == words[order][:-1])
        if len(again):
            first, second = (names[owners[order[again[0] + step]]] for step in (0, 1))
            unit = words[order[again[0]]] & np.uint64(0xFFFFFFFF)
            raise OptionError(
                f"Silos {first!r} and {second!r} share an id ({what}, id {unit}); ids must be unique, or rename one of "
                "the silos."
            )


def fingerprint(model, data, key, algorithm, num_rounds=None):
    """What a run is: model, silos, data, key and options, each hashed; and its rounds, if steps depend on them."""
    programs = {silo.program: silo for silo in data.values()}
    prints = sorted(program.fingerprint(silo) for program, silo in programs.items())
    contents = hashlib.sha256("".join(silo.fingerprint() for silo in data.values()).encode())
    ids = hashlib.sha256()
    for silo in data.values():
        for leaf in jax.tree.leaves(silo.ids):
            ids.update(np.asarray(leaf).tobytes())
    return {
        "precision": str(jnp.result_type(float)),
        "model": "".join([model.population.fingerprint(), *prints]),
        "set of silos": ",".join(data),
        "data set": contents.hexdigest(),
        "key": np.asarray(jax.random.key_data(key)).tobytes().hex(),
        "algorithm or option of it": _describe_options(algorithm),
        "inference network": _describe_network(algorithm.local_family, programs),
        "assignment of unit_ids": ids.hexdigest(),
        "number of units": ",".join(str(float(silo.num_units)) for silo in data.values()),
        "num_rounds (the default step size falls with it)": str(num_rounds),
    }


def _describe_network(local_family, programs):
    """What the network and its inputs compute, silo program by silo program."""
    if not isinstance(local_family, Amortized):
        return ""
    prints = sorted(str(inputs_identity(local_family, silo)) for silo in programs.values())
    silos = {str(position): silo for position, silo in enumerate(programs.values())}
    return json.dumps([network_identity(local_family, silos), prints], sort_keys=True)


def _describe_options(algorithm):
    """The algorithm and those of its options that have a plain value; functions cannot be compared."""
    plain = {}
    for field in dataclasses.fields(algorithm):
        value = getattr(algorithm, field.name)
        parts = value if isinstance(value, tuple) else [value]
        if field.name in ("fast_start", "fixed_noise", "privacy") and dataclasses.is_dataclass(value):
            plain[field.name] = _describe_options(value)
        elif all(part is None or isinstance(part, int | float | str) for part in parts):
            plain[field.name] = (type(value).__name__, *parts)
    return f"{type(algorithm).__name__}({plain})"
