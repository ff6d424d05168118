"""The stopping rule on traces whose truth is known."""

import numpy as np
import pytest

from sfvi import StoppingRule

RULE = StoppingRule()


def trace(kind, rounds, seed=0):
    """ELBO with noise of sd 5, and marginals of two latents (sd 1), every 250 rounds."""
    generator = np.random.default_rng(seed)
    t = np.arange(rounds)
    settled = np.exp(-t / {"settled": 150, "slow": 4000, "slope": 150}[kind])
    elbo = -1000 - 100 * settled + 5 * generator.normal(size=rounds)
    if kind == "slope":
        elbo += 0.002 * t
    rows = t[249::250]
    means = np.stack([settled[rows] * 5, 0.01 * generator.normal(size=len(rows))], axis=1)
    return elbo, rows + 1, means, np.ones_like(means)


@pytest.mark.parametrize("seed", range(5))
def test_passes_a_settled_run(seed):
    check = RULE.check(*trace("settled", 6000, seed))
    assert check.passed
    assert abs(check.gain) < 4 * check.gain_se


@pytest.mark.parametrize("kind", ["slow", "slope"])
@pytest.mark.parametrize("seed", range(5))
def test_holds_out_while_something_moves(kind, seed):
    check = RULE.check(*trace(kind, 6000, seed))
    assert not check.passed
    if kind == "slow":
        assert check.drift > RULE.drift
    else:
        assert check.gain > 2 * check.gain_se


def test_standard_error_covers_the_noise():
    gains = [RULE.check(*trace("settled", 6000, seed)) for seed in range(60)]
    spread = np.std([g.gain for g in gains])
    assert 0.7 < np.mean([g.gain_se for g in gains]) / spread < 1.4


def test_patience_and_sentences():
    passed = RULE.check(*trace("settled", 6000))
    failed = RULE.check(*trace("slow", 6000))
    assert not RULE.verdict([]).converged
    assert "too few rounds" in RULE.verdict([]).verdict
    elbo, rounds, means, sds = trace("settled", 6000)
    late = rounds > 5000  # snapshots only at the end, as after a resume without the rule
    assert RULE.check(elbo, rounds[late], means[late], sds[late]) is None
    assert not RULE.verdict([passed]).converged
    assert not RULE.verdict([passed, failed]).converged
    done = RULE.verdict([failed, passed, passed])
    assert done.converged
    assert done.verdict.startswith("Converged after 6000 rounds: over the last third the ELBO gained")
    assert len(done.checks) == 3
