"""A step of SFVI on the paper's network, against a hand-written step on pooled data; writes NETWORKS.md.

python -m benchmarks.networks            # about five minutes
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.scipy.stats import norm
from numpyro.infer import init_to_uniform

from sfvi import SFVI
from sfvi.bench import step
from sfvi.bench.contestants import Contestant, advance, prepare
from sfvi.bench.step import Comparison, Effort
from sfvi.families import block
from sfvi.zoo import hierarchical_bnn

from . import contest, report

FEATURES, WIDTH, CLASSES = 784, 64, 10
SCALE, STEP_SIZE, TARGET = 0.05, 0.01, 1.15
MODULE = "benchmarks.networks"
CASES = {10: (5421, 500), 50: (1084, 100)}  # rows of a silo and of a batch
FULL = Effort(repetitions=5, steps=20)
Silos = Mapping[str, Mapping[str, np.ndarray]]


def simulated(num_silos: int, rows: int) -> dict[str, dict[str, np.ndarray]]:
    """Silos with arrays of MNIST's shapes; what is in them does not matter to a step's time."""
    generator = np.random.default_rng(0)
    x = (generator.random((rows, FEATURES), np.float32) < 0.2).astype(np.float32)
    return {
        f"silo-{i:02d}": {"x": np.roll(x, i, 0), "y": generator.integers(0, CLASSES, rows).astype(np.int32)}
        for i in range(num_silos)
    }


def hand_written(silos: Silos, batch: int, steps: int) -> Contestant:
    """The loop a user of JAX writes for pooled data: all silos' latents in one array, one jitted scan."""
    x, y = (jnp.stack([data[part] for data in silos.values()]) for part in ("x", "y"))
    num_silos, rows = y.shape
    adam, first = optax.adam(STEP_SIZE), FEATURES * WIDTH
    start = jax.random.uniform(jax.random.key(0), (first + 1,), minval=-0.1, maxval=0.1)
    shape = (num_silos, first + WIDTH * CLASSES)
    log_scale = np.log(SCALE)
    params = {
        "loc": start,
        "log_scale": jnp.full(first + 1, log_scale),
        "own_loc": jnp.zeros(shape),
        "own_log_scale": jnp.full(shape, log_scale),
    }

    def elbo(params, noise, x, y):
        z = params["loc"] + jnp.exp(params["log_scale"]) * noise[0]
        own = params["own_loc"] + jnp.exp(params["own_log_scale"]) * noise[1]
        fixed = lax.stop_gradient(params)
        log_q = norm.logpdf(z, fixed["loc"], jnp.exp(fixed["log_scale"])).sum()
        log_q += norm.logpdf(own, fixed["own_loc"], jnp.exp(fixed["own_log_scale"])).sum()
        mu, sigma = z[:first].reshape(FEATURES, WIDTH), jnp.exp(z[first])
        log_p = norm.logpdf(mu).sum() + norm.logpdf(sigma) + jnp.log(2.0) + z[first] + norm.logpdf(own).sum()
        layers = mu + sigma * own[:, :first].reshape(num_silos, FEATURES, WIDTH)
        heads = own[:, first:].reshape(num_silos, WIDTH, CLASSES)
        scores = jnp.einsum("jnk,jkc->jnc", jax.nn.relu(jnp.einsum("jni,jik->jnk", x, layers)), heads)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(scores), y[..., None], axis=2)
        return log_p - log_q + rows / batch * chosen.sum()

    @jax.jit
    def scan(state, x, y):
        def step(state, _):
            params, opt_state, index = state
            keys = jax.random.split(jax.random.fold_in(jax.random.key(1), index), 3)
            noise = jax.random.normal(keys[0], start.shape), jax.random.normal(keys[1], shape)
            drawn = jax.random.randint(keys[2], (num_silos, batch), 0, rows)
            batches = jnp.take_along_axis(x, drawn[..., None], axis=1), jnp.take_along_axis(y, drawn, axis=1)
            loss, gradient = jax.value_and_grad(lambda params: -elbo(params, noise, *batches))(params)
            updates, opt_state = adam.update(gradient, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state, index + 1), -loss

        return lax.scan(step, state, length=steps)

    return Contestant((params, adam.init(params), jnp.asarray(0)), lambda state: scan(state, x, y))


def federated(silos: Silos, batch: int, steps: int) -> Contestant:
    """SFVI, on the compiled loop that `sfvi.fit` uses."""
    algorithm = SFVI(
        optimizer=optax.adam(STEP_SIZE),
        local_family=block(coupling="none"),
        init_loc_fn=init_to_uniform(radius=0.1),
        init_scale=SCALE,
    )
    rounds, state = prepare(hierarchical_bnn(batch_size=batch), silos, algorithm, merge=True)
    return Contestant(state, lambda state: advance(rounds, state, steps))


CONTESTANTS = {step.HAND: hand_written, step.MERGED: federated}


def compare(num_silos: int, effort: Effort) -> Comparison:
    """Both, in turn."""
    rows, batch = CASES[num_silos]
    silos = simulated(num_silos, rows)
    entries = {name: make(silos, batch, effort.steps) for name, make in CONTESTANTS.items()}
    return Comparison(num_silos, step.measure(entries, effort))


def _contestant(num_silos, name):
    rows, batch = CASES[num_silos]
    return CONTESTANTS[name](simulated(num_silos, rows), batch, 2)


def document(effort: Effort) -> str:
    """Measure, and tell."""
    parts = [
        "# A step on the paper's network",
        f"Made by `python -m {MODULE}` on: {report.machine()}. Ratios carry over to other machines, seconds do not.",
        "The hierarchical network of `zoo.hierarchical_bnn`, 784-64-10, mean field: 100,354 numbers at the server and "
        "101,632 in each silo, Adam's moments beside them, float32. Compared with the step one would write by hand for "
        f"pooled data, same objective and estimator. They take turns, {effort.repetitions} repetitions of "
        f"{effort.steps} steps after one that compiles.",
    ]
    header = [
        "silos",
        "batch",
        "",
        "ms a step, min",
        "median",
        "steps/s",
        "SFVI / hand-written, min",
        "median",
        "peak, GB",
    ]
    rows = []
    for num_silos in CASES:
        found = compare(num_silos, effort)
        for name in CONTESTANTS:
            seconds = 1000 * found.outcomes[name].seconds
            ratios = [f"{found.ratio(name, step.HAND, summary):.2f}" for summary in (np.min, np.median)]
            cells = [
                str(num_silos),
                str(CASES[num_silos][1]),
                name,
                f"{seconds.min():.1f}",
                f"{np.median(seconds):.1f}",
                f"{1000 / np.median(seconds):.0f}",
            ]
            rows.append([*cells, *ratios, f"{contest.memory(MODULE, num_silos, name) / 1e9:.2f}"])
    parts.append(report.table(header, rows))
    parts.append(f"Target: at most {TARGET} times the hand-written step.")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    contest.main(MODULE, __doc__.splitlines()[0], "NETWORKS.md", document, _contestant, FULL)
