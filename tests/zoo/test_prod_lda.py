"""ProdLDA: the density by hand, and topics that are known."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer.util import log_density

import sfvi
from sfvi import topics, zoo
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


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("form", ["published", "printed"])
def test_the_density_is_the_formula(form, background):
    data = SILOS["b"]
    chosen = {"form": form, "background": background, "alpha": 0.5, "beta": 0.7}
    model = zoo.prod_lda(num_words=NUM_WORDS, num_topics=NUM_TOPICS, batch_size=None, **chosen)
    generator = np.random.default_rng(0)
    h, t = generator.normal(size=(40, NUM_TOPICS)), generator.normal(size=(NUM_TOPICS, NUM_WORDS))
    if form == "printed":
        latent = np.exp(t)  # whose shares are Dirichlet(0.7)
        t = latent / latent.sum(1, keepdims=True)
        prior, own, weights = dist.Gamma(0.7, 1.0), dist.Normal(0.5, 1.0), h
    else:
        latent, prior, own = t, dist.Normal(0.0, 0.7), dist.Normal(0.0, np.sqrt((1 - 1 / 3) / 0.5))
        weights = np.exp(h) / np.exp(h).sum(1, keepdims=True)
    common = generator.normal(size=NUM_WORDS) * background
    logits = weights @ t + common
    logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    expected = prior.log_prob(latent).sum() + own.log_prob(h).sum() + (dense(data, NUM_WORDS) * logs).sum()
    values = {"sizes" if form == "printed" else "topics": latent, "b/h": h}
    if background:
        values["background"] = common
        expected += dist.Normal(0.0, 3.0).log_prob(common).sum()
    found, _ = log_density(model.as_one_program({"b": data}), (), {}, values)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize("amortized", [False, True])
def test_topics_that_are_known_are_found(amortized, float32):
    """Each found topic has nine or more of its first ten words from one of the true ones, all three found."""
    model = zoo.prod_lda(num_words=NUM_WORDS, num_topics=NUM_TOPICS, batch_size=20)
    encoder = None
    if amortized:
        encoder = zoo.document_encoder(0, num_words=NUM_WORDS, num_topics=NUM_TOPICS, num_hidden=16)
    algorithm = sfvi.SFVI(optimizer=optax.adam(0.03), **zoo.families_for_topics(encoder))
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
    """Twenty topics of ten words: three to seven are found if they start as near together as without an encoder, or if
    it sees words alone."""
    num_topics, num_words = 20, 200
    generator = np.random.default_rng(5)
    main = generator.integers(num_topics, size=(2, 200))
    odds = np.where(np.arange(num_words) // 10 == main[..., None], 0.06, 0.4 / 190)
    counts = generator.multinomial(40, odds / odds.sum(-1, keepdims=True)).astype(np.uint16)
    words = np.tile(np.arange(num_words, dtype=np.uint16), (200, 1))
    silos = {silo: {"words": words, "counts": own} for silo, own in zip("ab", counts, strict=True)}
    encoder = zoo.document_encoder(0, num_words=num_words, num_topics=num_topics)
    algorithm = sfvi.SFVI(optimizer=optax.adam(0.01), **zoo.families_for_topics(encoder))
    model = zoo.prod_lda(num_words=num_words, num_topics=num_topics, batch_size=64, alpha=1.0, beta=0.5, fixed=True)
    fit = sfvi.fit(model, silos, key=0, num_rounds=1500, algorithm=algorithm)
    found = np.asarray(fit.posterior.sample(0, 200)["topics"]).mean(0)
    best = {int(np.bincount(row // 10).argmax()) for row in topics.top_words(found, top=10)}
    assert len(best) >= 18


def test_the_background_starts_where_words_are_frequent():
    start = zoo.families_for_topics(frequencies=[8, 2, 0, 1])["init_loc_fn"]
    found = start({"name": "background"})
    np.testing.assert_allclose(found, np.log([8, 2, 1, 1]) - np.log(16) / 4, rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: zoo.prod_lda(num_words=3, form="other"), "'published' or 'printed'"),
        (lambda: zoo.prod_lda(num_words=3, num_topics=1), "num_topics is 1"),
        (lambda: zoo.prod_lda(num_words=3, batch_size=0), "batch_size is 0"),
        (lambda: zoo.prod_lda(num_words=3, batch_size=2.5), "batch_size is 2.5"),
        (lambda: zoo.prod_lda(num_words=3, background="no"), "background is 'no'; give True or False"),
        (lambda: zoo.prod_lda(num_words=3, alpha=-1.0), "alpha is -1.0; give a number above 0"),
        (lambda: zoo.prod_lda(num_words=3, beta=float("nan")), "beta is nan; give a number above 0"),
        (lambda: zoo.prod_lda(num_words=3, form="printed", alpha="x"), "alpha is 'x'; give a number."),
        (lambda: zoo.document_encoder(0, num_words=3, num_hidden=-1), "document_encoder: num_hidden is -1"),
        (lambda: zoo.document_encoder(0, num_words=3, depth=True), "document_encoder: depth is True"),
    ],
)
def test_wrong_options_are_refused(make, says):
    with pytest.raises(sfvi.OptionError, match=says):
        make()


def wrong(part, value):
    """The documents of a silo with one number changed."""
    bag = {name: values.astype(np.int64) for name, values in SILOS["b"].items()}
    bag[part][7, 3] = value
    return bag


@pytest.mark.parametrize(
    ("bag", "says"),
    [
        (wrong("words", NUM_WORDS), "a document holds word number 30, but num_words is 30"),
        (wrong("words", -1), "words hold numbers that are negative"),
        (wrong("counts", -1), "counts hold numbers that are negative"),
        ({"words": SILOS["b"]["words"], "counts": SILOS["b"]["counts"] * 0.5}, "counts hold numbers .* not whole"),
        ({"words": SILOS["b"]["words"], "counts": SILOS["b"]["counts"][:20]}, "words have the shape"),
        ({"words": SILOS["b"]["words"]}, "there is no 'counts' in the data"),
    ],
)
def test_documents_that_are_none_are_refused_before_any_round(bag, says):
    """Whatever the minibatch: a document with a word beyond the vocabulary may not be drawn for long."""
    model = zoo.prod_lda(num_words=NUM_WORDS, num_topics=NUM_TOPICS, batch_size=5)
    with pytest.raises(sfvi.DataError, match=f"^Silo 'two': {says}"):
        sfvi.fit(model, {"one": SILOS["a"], "two": bag}, key=0, num_rounds=2, algorithm=sfvi.SFVI())


def test_an_encoder_of_another_vocabulary_is_refused():
    model = zoo.prod_lda(num_words=NUM_WORDS, num_topics=NUM_TOPICS)
    encoder = zoo.document_encoder(0, num_words=NUM_WORDS // 2, num_topics=NUM_TOPICS)
    with pytest.raises(sfvi.OptionError, match="3 topics of 15 words, but the model has 90 global latents"):
        sfvi.fit(model, SILOS, key=0, num_rounds=2, algorithm=sfvi.SFVI(**zoo.families_for_topics(encoder)))


def test_defaults_that_would_take_very_long_are_remarked_on():
    """By default a document's weights would follow every number of every topic."""
    model = zoo.prod_lda(num_words=800, num_topics=4)
    bag = {"words": np.array([[0, 1], [799, 2]] * 500), "counts": np.ones((1000, 2), int)}
    says = r"q has 25,620,400 numbers for 7,200 latents, 6,400 of them .* local_family=families.block"
    with pytest.raises(UserWarning, match=says):
        sfvi.fit(model, {"a": bag}, key=0, num_rounds=1, algorithm=sfvi.SFVI())
