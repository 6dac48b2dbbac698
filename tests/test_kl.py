"""KL estimators: values by 2.14, and gradients exact on a vocabulary of 5 by enumerating it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.train.kl import LOG_RATIO, AdaptiveKL, StraightThrough, Unbiased, Weighted, k1, k2, k3

LOGP = np.log(np.array([[0.5, 0.3, 0.9, 0.2]], np.float32))
REF = np.log(np.array([[0.45, 0.35, 0.7, 0.3]], np.float32))
FORMS = [k1, k2, k3, *(kind(of) for kind in (StraightThrough, Weighted, Unbiased) for of in (k1, k3))]


def name(form) -> str:
    return getattr(form, "__name__", None) or f"{type(form).__name__} {form.of.__name__}"


def close(a, b, tolerance=1e-5):
    np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "k, golden",
    [
        (k1, [0.105361, -0.154151, 0.251314, -0.405465]),
        (k2, [0.00555, 0.011881, 0.031579, 0.082201]),
        (k3, [0.005361, 0.012516, 0.029092, 0.094535]),
    ],
)
def test_values(k, golden):
    """The corrected forms have the values of what they correct, where the policy is the one that sampled."""
    close(k(LOGP, REF), [golden], 2e-6)
    close(StraightThrough(k)(LOGP, REF), [golden], 2e-6)
    for form in (Weighted, Unbiased) if k in (k1, k3) else ():
        close(form(k)(LOGP, REF, LOGP), [golden], 2e-6)


@pytest.mark.pitfall("T-29")
@pytest.mark.parametrize("form", FORMS, ids=name)
def test_equal_policies_have_exactly_none(form):
    assert np.all(np.asarray(form(LOGP, LOGP, REF)) == 0)


@pytest.mark.pitfall("T-56")
def test_k3_is_never_negative():
    d = np.linspace(-30, 30, 1001, dtype=np.float32)[None]
    assert np.all(np.asarray(k3(d, 0 * d)) >= 0)


LOGITS, REFERENCE = np.array([0.3, -1.0, 0.8, 0.1, -0.4]), np.log([0.1, 0.3, 0.2, 0.25, 0.15])
BEFORE = np.array([0.1, -0.5, 0.5, 0.4, -0.2])  # logits of the policy that sampled, where it is another


def log(z):
    return z - np.log(np.exp(z).sum())


def kl(z):
    return (np.exp(log(z)) * (log(z) - REFERENCE)).sum()


def reverse(z):
    return (np.exp(REFERENCE) * (REFERENCE - log(z))).sum()


def difference(f):
    return np.array([(f(LOGITS + d) - f(LOGITS - d)) / 2e-5 for d in 1e-5 * np.eye(5)])


def expected(form, sampler):
    """Value and gradient of the mean over every token of the vocabulary, drawn by the sampler."""
    p, old, ref = (jnp.asarray(x, jnp.float32) for x in (np.exp(log(sampler)), log(sampler), REFERENCE))
    of = lambda z: jnp.sum(p * form(jax.nn.log_softmax(z), ref, old))
    return jax.value_and_grad(of)(jnp.asarray(LOGITS, jnp.float32))


@pytest.mark.pitfall("T-61")
@pytest.mark.pitfall("T-62")
@pytest.mark.parametrize("form", FORMS, ids=name)
def test_gradients_on_policy(form):
    """k1 has none, k3 that of KL(reference || policy), and all others that of KL(policy || reference)."""
    value, grad = expected(form, LOGITS)
    truth = {k1: np.zeros(5), k3: difference(reverse)}.get(form, difference(kl))
    close(grad, truth)
    assert np.abs(difference(kl) - difference(reverse)).max() > 0.05  # control: these are apart
    if form is not k2:
        close(value, kl(LOGITS), 1e-6)


@pytest.mark.pitfall("T-62")
@pytest.mark.parametrize("of", [k1, k3])
def test_gradients_off_policy(of):
    """Of tokens that another policy chose, the ratio alone makes value and gradient right."""
    value, grad = expected(Unbiased(of), BEFORE)
    close(value, kl(LOGITS), 1e-6)
    close(grad, difference(kl))
    wrong, other = expected(Weighted(of), BEFORE)
    assert abs(wrong - kl(LOGITS)) > 0.01 and np.abs(other - difference(kl)).max() > 0.01


@pytest.mark.pitfall("T-62")
@pytest.mark.parametrize("form", [k3, StraightThrough(), Weighted(), Unbiased()], ids=name)
@pytest.mark.parametrize("d", [-500.0, -30.0, 30.0, 500.0])
def test_what_is_clamped_is_finite_and_has_no_gradient_of_k3(form, d):
    logp = jnp.full((1, 1), min(d, 0.0))
    ref = logp - d
    value, grad = jax.value_and_grad(lambda x: jnp.sum(form(x, ref, logp)))(logp)
    assert np.isfinite(value) and value == pytest.approx(float(k3(jnp.float32(np.sign(d) * LOG_RATIO), 0.0)), rel=1e-6)
    assert grad[0, 0] == (d if form == StraightThrough() else 0)  # k2's is not clamped


@pytest.mark.parametrize("kind", [Weighted, Unbiased])
def test_what_does_not_estimate_kl_is_refused(kind):
    with pytest.raises(ValueError, match="of=k2 must be k1 or k3"):
        kind(k2)


def test_adaptive_kl():
    """beta (1 + clip(KL / target - 1, -.2, .2) n / horizon)."""
    adapt = AdaptiveKL(target=0.1, horizon=1000)
    close(adapt(0.5, 0.1, 256), 0.5)
    close(adapt(0.5, 0.11, 256), 0.5 * (1 + 0.1 * 0.256))
    close(adapt(0.5, 9.0, 256), 0.5 * (1 + 0.2 * 0.256))
    close(adapt(0.5, 0.0, 256), 0.5 * (1 - 0.2 * 0.256))
    for bad in (dict(target=0.0), dict(horizon=-1)):
        with pytest.raises(ValueError, match=f"{next(iter(bad))}="):
            AdaptiveKL(**bad)
