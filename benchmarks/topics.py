"""A step of SFVI on a topic model, against a hand-written step on pooled documents; writes TOPICS.md.

python -m benchmarks.topics            # about five minutes
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.scipy.stats import norm
from numpyro.infer import init_to_uniform

from sfvi import SFVI, bounds
from sfvi.bench import step
from sfvi.bench.contestants import Contestant, advance, prepare
from sfvi.bench.step import Comparison, Effort
from sfvi.data.text import padded
from sfvi.families import block, mean_field
from sfvi.zoo import prod_lda
from sfvi.zoo.prod_lda import log_likelihood

from . import contest, report

WORDS, TOPICS, SILOS, DOCUMENTS, LONGEST = 2000, 21, 3, 6282, 808  # of 20 Newsgroups
SCALE, STEP_SIZE, TARGET = 0.05, 0.01, 1.15
MODULE = "benchmarks.topics"
BATCHES = (64, 200)  # documents of each silo in a step
FULL = Effort(repetitions=20, steps=100)
Silos = Mapping[str, Mapping[str, np.ndarray]]


def simulated() -> dict[str, dict[str, np.ndarray]]:
    """Silos of documents as long as posts are: half of them have 22 different words or more, the longest 808."""
    generator, silos = np.random.default_rng(0), {}
    for number in range(SILOS):
        lengths = np.clip(np.exp(generator.normal(np.log(22), 0.95, DOCUMENTS)), 1, LONGEST).astype(int)
        lengths[0] = LONGEST
        words = np.concatenate([np.sort(generator.permutation(WORDS)[:n]) for n in lengths])
        counts = generator.geometric(0.63, len(words))
        silos[f"silo-{number}"] = padded(np.cumsum([0, *lengths]), words, counts)
    return silos


def hand_written(silos: Silos, batch: int, steps: int) -> Contestant:
    """The loop a user of JAX writes for pooled documents: latents in one array, moments by document, a jitted scan."""
    words, counts = (jnp.concatenate([bag[part] for bag in silos.values()]) for part in ("words", "counts"))
    total, drawn = words.shape[0], batch * len(silos)
    shape, own_shape = (TOPICS, WORDS), (total, TOPICS)
    adam, log_scale = optax.adam(STEP_SIZE), np.log(SCALE)
    shared = {
        "loc": jax.random.uniform(jax.random.key(0), shape, minval=-0.1, maxval=0.1),
        "log_scale": jnp.full(shape, log_scale),
        "alpha": jnp.asarray(-np.log(TOPICS), jnp.float32),
        "beta": jnp.zeros(()),
    }
    own = {"loc": jnp.zeros(own_shape), "log_scale": jnp.full(own_shape, log_scale)}

    def elbo(shared, own, noise, words, counts, rows):
        z = shared["loc"] + jnp.exp(shared["log_scale"]) * noise[0]
        h = own["loc"] + jnp.exp(own["log_scale"]) * noise[1]
        fixed, fixed_own = lax.stop_gradient((shared, own))
        log_p = norm.logpdf(z, 0.0, jnp.exp(shared["beta"])).sum()
        log_q = norm.logpdf(z, fixed["loc"], jnp.exp(fixed["log_scale"])).sum()
        spread = jnp.sqrt((1 - 1 / TOPICS) / jnp.exp(shared["alpha"]))
        term = norm.logpdf(h, 0.0, spread).sum(1)
        term -= norm.logpdf(h, fixed_own["loc"], jnp.exp(fixed_own["log_scale"])).sum(1)
        term += log_likelihood(jax.nn.softmax(h) @ z, words, counts, rows)
        return log_p - log_q + total / drawn * term.sum()

    @jax.jit
    def scan(state, words, counts):
        def one(state, _):
            shared, shared_state, own, own_state, index = state
            keys = jax.random.split(jax.random.fold_in(jax.random.key(1), index), 3)
            rows = lax.top_k(jax.random.uniform(keys[0], (total,)), drawn)[1]
            noise = jax.random.normal(keys[1], shape), jax.random.normal(keys[2], (drawn, TOPICS))
            some, some_state = jax.tree.map(lambda leaf: leaf[rows], (own, own_state))
            value, gradients = jax.value_and_grad(elbo, argnums=(0, 1))(shared, some, noise, words, counts, rows)
            down, own_down = jax.tree.map(jnp.negative, gradients)
            updates, shared_state = adam.update(down, shared_state, shared)
            own_updates, some_state = jax.vmap(adam.update)(own_down, some_state)
            some = optax.apply_updates(some, own_updates)
            own, own_state = jax.tree.map(
                lambda leaf, new: leaf.at[rows].set(new, unique_indices=True), (own, own_state), (some, some_state)
            )
            return (optax.apply_updates(shared, updates), shared_state, own, own_state, index + 1), value

        return lax.scan(one, state, length=steps)

    state = (shared, adam.init(shared), own, jax.vmap(adam.init)(own), jnp.asarray(0))
    return Contestant(state, lambda state: scan(state, words, counts))


def federated(silos: Silos, batch: int, steps: int) -> Contestant:
    """SFVI, on the compiled loop that `sfvi.fit` uses."""
    algorithm = SFVI(
        optimizer=optax.adam(STEP_SIZE),
        global_family=mean_field(),
        local_family=block(coupling="none", within="diagonal"),
        init_loc_fn=init_to_uniform(radius=0.1),
        init_scale=SCALE,
        bound=bounds.elbo(),
    )
    model = prod_lda(num_words=WORDS, num_topics=TOPICS, batch_size=batch)
    rounds, state = prepare(model, silos, algorithm, merge=True)
    return Contestant(state, lambda state: advance(rounds, state, steps))


CONTESTANTS = {step.HAND: hand_written, step.MERGED: federated}


def compare(batch: int, effort: Effort) -> Comparison:
    """Both, in turn."""
    silos = simulated()
    entries = {name: make(silos, batch, effort.steps) for name, make in CONTESTANTS.items()}
    return Comparison(SILOS, step.measure(entries, effort))


def _contestant(batch, name):
    return CONTESTANTS[name](simulated(), batch, 2)


def document(effort: Effort) -> str:
    """Measure, and tell."""
    dense = 4 * SILOS * DOCUMENTS * WORDS / 1e6
    kept = sum(values.nbytes for bag in simulated().values() for values in bag.values()) / 1e6
    parts = [
        "# A step on a topic model",
        f"Made by `python -m {MODULE}` on: {report.machine()}. Ratios carry over to other machines, seconds do not.",
        f"ProdLDA as published (`zoo.prod_lda`): {SILOS} silos of {DOCUMENTS:,} documents, {WORDS:,} words, {TOPICS} "
        f"topics, mean field: {2 * TOPICS * WORDS:,} numbers at the server, {2 * SILOS * DOCUMENTS * TOPICS:,} in the "
        "silos, Adam's moments beside them, float32. Compared with the step one would write by hand for pooled "
        f"documents, same objective and estimator. They take turns, {effort.repetitions} repetitions of {effort.steps} "
        f"steps after one that compiles. The counts take {kept:.0f} MB; as a dense array of floats they would take "
        f"{dense:.0f} MB.",
    ]
    header = ["batch", "", "ms a step, min", "median", "documents/s", "SFVI / hand-written, min", "median", "peak, GB"]
    rows = []
    for batch in BATCHES:
        found = compare(batch, effort)
        for name in CONTESTANTS:
            seconds = found.outcomes[name].seconds
            ratios = [f"{found.ratio(name, step.HAND, summary):.2f}" for summary in (np.min, np.median)]
            shown = [f"{1000 * seconds.min():.1f}", f"{1000 * np.median(seconds):.1f}"]
            speed = f"{SILOS * batch / np.median(seconds):,.0f}"
            rows.append(
                [f"{SILOS} x {batch}", name, *shown, speed, *ratios, f"{contest.memory(MODULE, batch, name) / 1e9:.2f}"]
            )
    parts.append(report.table(header, rows))
    parts.append(f"Target: at most {TARGET} times the hand-written step.")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    contest.main(MODULE, __doc__.splitlines()[0], "TOPICS.md", document, _contestant, FULL)
