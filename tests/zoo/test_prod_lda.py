"""ProdLDA: the density by hand, and topics that are known."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import init_to_uniform
from numpyro.infer.util import log_density

import sfvi
from sfvi import families, topics, zoo
from sfvi.data.text import dense
from sfvi.zoo.prod_lda import log_likelihood

NUM_WORDS, NUM_TOPICS = 30, 3


def simulated(num_documents, seed):
    """Three topics of ten words each; a document is nearly all of one."""
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(num_documents):
        main = generator.integers(NUM_TOPICS)
        odds = np.where(np.arange(NUM_WORDS) // 10 == main, 0.09, 0.005)
        rows.append(generator.multinomial(25, odds / odds.sum()))
    counts = np.array(rows, np.uint16)
    return {"words": np.tile(np.arange(NUM_WORDS, dtype=np.uint16), (num_documents, 1)), "counts": counts}


SILOS = {"a": simulated(60, 0), "b": simulated(40, 1)}


@pytest.mark.parametrize("form", ["published", "printed"])
def test_the_density_is_the_formula(form):
    data = SILOS["b"]
    model = zoo.prod_lda(num_words=NUM_WORDS, num_topics=NUM_TOPICS, form=form, batch_size=None, alpha=0.5, beta=0.7)
    generator = np.random.default_rng(0)
    h, t = generator.normal(size=(40, NUM_TOPICS)), generator.normal(size=(NUM_TOPICS, NUM_WORDS))
    if form == "printed":
        latent = np.exp(t)  # whose shares are Dirichlet(0.7)
        t = latent / latent.sum(1, keepdims=True)
        prior, own, weights = dist.Gamma(0.7, 1.0), dist.Normal(0.5, 1.0), h
    else:
        latent, prior, own = t, dist.Normal(0.0, 0.7), dist.Normal(0.0, np.sqrt((1 - 1 / 3) / 0.5))
        weights = np.exp(h) / np.exp(h).sum(1, keepdims=True)
    logits = weights @ t
    logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    expected = prior.log_prob(latent).sum() + own.log_prob(h).sum() + (dense(data, NUM_WORDS) * logs).sum()
    values = {"sizes" if form == "printed" else "topics": latent, "b/h": h}
    found, _ = log_density(model.as_one_program({"b": data}), (), {}, values)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize("amortized", [False, True])
def test_topics_that_are_known_are_found(amortized, float32):
    """Each found topic has nine or more of its first ten words from one of the true ones, all three found."""
    model = zoo.prod_lda(num_words=NUM_WORDS, num_topics=NUM_TOPICS, batch_size=20)
    own = families.block(coupling="none")
    if amortized:
        own = zoo.document_encoder(0, num_words=NUM_WORDS, num_topics=NUM_TOPICS, num_hidden=16)
    algorithm = sfvi.SFVI(
        optimizer=optax.adam(0.03),
        global_family=families.mean_field(),
        local_family=own,
        init_loc_fn=lambda site=None: init_to_uniform(site, radius=0.5),
        bound=sfvi.bounds.elbo(),
    )
    fit = sfvi.fit(model, SILOS, key=0, num_rounds=1000, algorithm=algorithm)
    found = np.asarray(fit.posterior.sample(0, 200)["topics"]).mean(0)
    true = topics.top_words(found, top=10) // 10
    shares = [np.bincount(row, minlength=3) for row in true]
    assert min(share.max() for share in shares) >= 9
    assert sorted(share.argmax() for share in shares) == [0, 1, 2]
    assert set(fit.theta) == {"alpha", "beta"}


def test_an_encoder_keeps_its_head_with_long_documents():
    """A document of a hundred thousand words, however they repeat, has latents of the same order as one of ten."""
    encoder = zoo.document_encoder(0, num_words=50, num_topics=4, num_hidden=16)
    words = jnp.tile(jnp.arange(50, dtype=jnp.int32), (3, 1))
    counts = jnp.stack([jnp.zeros(50, jnp.int32), jnp.full(50, 1), jnp.full(50, 2_000)]).astype(jnp.int32)
    many = jax.tree.map(lambda leaf: 30 * leaf, encoder.initial())
    some = jax.random.normal(jax.random.key(1), (4 * 50,))
    found = encoder.build(many, {"words": words, "counts": counts}, 4).given(some)
    assert jnp.isfinite(found.loc).all()
    assert float(jnp.max(jnp.abs(found.log_scale))) <= 4.0
    ratio = jnp.linalg.norm(found.loc[:, 2]) / jnp.linalg.norm(found.loc[:, 1])
    assert 0.3 < float(ratio) < 3.0


@pytest.mark.parametrize("background", [False, True])
def test_an_encoder_begins_with_the_gradient_of_the_likelihood(background):
    """Means start along the gradient by h at equal weights, whatever is added to a topic."""
    generator = np.random.default_rng(3)
    rows = jnp.asarray(generator.normal(size=(NUM_TOPICS + background, NUM_WORDS)))
    data = {part: jnp.asarray(values[:5]) for part, values in SILOS["a"].items()}

    def likelihood(h):
        scores = jax.nn.softmax(h) @ rows[:NUM_TOPICS] + rows[NUM_TOPICS:].sum(0)
        return log_likelihood(scores, data["words"], data["counts"], jnp.arange(5)).sum()

    gradient = jax.grad(likelihood)(jnp.zeros((5, NUM_TOPICS)))
    encoder = zoo.document_encoder(0, num_words=NUM_WORDS, num_topics=NUM_TOPICS, num_hidden=16)
    start = jax.tree.map(jnp.zeros_like, encoder.initial())
    found = encoder.build(start, data, NUM_TOPICS).given(rows.ravel()).loc.T
    unit = gradient / jnp.sqrt(jnp.mean(gradient**2, axis=1, keepdims=True))
    np.testing.assert_allclose(found, unit, rtol=1e-5, atol=1e-7)
    shifted = rows.at[:NUM_TOPICS].add(jnp.arange(3.0)[:, None])
    again = encoder.build(start, data, NUM_TOPICS).given(shifted.ravel()).loc.T
    np.testing.assert_allclose(again, found, rtol=1e-6, atol=1e-9)


def test_amortized_topics_do_not_end_up_alike(float32):
    """Twelve topics of ten words: an encoder that sees words alone finds few of them, and those many times."""
    num_topics, num_words = 12, 120
    generator = np.random.default_rng(5)
    main = generator.integers(num_topics, size=(2, 200))
    odds = np.where(np.arange(num_words) // 10 == main[..., None], 0.06, 0.4 / 110)
    counts = generator.multinomial(40, odds / odds.sum(-1, keepdims=True)).astype(np.uint16)
    words = np.tile(np.arange(num_words, dtype=np.uint16), (200, 1))
    silos = {silo: {"words": words, "counts": own} for silo, own in zip("ab", counts, strict=True)}
    algorithm = sfvi.SFVI(
        optimizer=optax.adam(0.01),
        global_family=families.mean_field(),
        local_family=zoo.document_encoder(0, num_words=num_words, num_topics=num_topics),
        init_loc_fn=lambda site=None: init_to_uniform(site, radius=0.1),
        bound=sfvi.bounds.elbo(),
    )
    model = zoo.prod_lda(num_words=num_words, num_topics=num_topics, batch_size=64, alpha=1.0, beta=0.5, fixed=True)
    fit = sfvi.fit(model, silos, key=0, num_rounds=1500, algorithm=algorithm)
    found = np.asarray(fit.posterior.sample(0, 200)["topics"]).mean(0)
    best = {int(np.bincount(row // 10).argmax()) for row in topics.top_words(found, top=10)}
    assert best == set(range(num_topics))


def test_unknown_forms_are_refused():
    with pytest.raises(sfvi.OptionError, match="'published' or 'printed'"):
        zoo.prod_lda(num_words=3, form="other")
    with pytest.raises(sfvi.OptionError, match="num_topics is 1"):
        zoo.prod_lda(num_words=3, num_topics=1)


def test_words_beyond_the_vocabulary_are_not_dropped_unsaid():
    data = {part: jnp.asarray(values[:2]) for part, values in SILOS["a"].items()}
    assert jnp.isnan(log_likelihood(jnp.zeros((2, NUM_WORDS - 1)), data["words"], data["counts"], jnp.arange(2))).all()
