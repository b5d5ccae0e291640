"""The losses against their published formulas, torch.distributions and finite differences."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowgrpo_ray.errors import ConfigError
from flowgrpo_ray.learning.losses import clipped_surrogate, kl, ratio_norm_log_ratio
from flowgrpo_ray.sampling.kernels import get_kernel

SIGMAS = torch.tensor([1.0, 0.9, 0.75, 0.5, 0.2, 0.0])
KERNELS = ("flow_sde", "cps", "dance_sde")


def draws(count, shape=(4, 3, 5), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


@settings(deadline=None)
@given(
    advantage=st.floats(-5, 5, allow_subnormal=False), log_ratio=st.floats(-1, 1, allow_subnormal=False),
    clip_low=st.floats(1e-3, 0.5), clip_high=st.floats(1e-3, 0.5))
def test_surrogate_is_ppos_formula(advantage, log_ratio, clip_low, clip_high):
    new, old = torch.tensor([log_ratio - 2.0], dtype=torch.float64), torch.tensor([-2.0], dtype=torch.float64)
    a, ratio = torch.tensor([advantage], dtype=torch.float64), (new - old).exp()
    expected = torch.maximum(-a * ratio, -a * ratio.clamp(1 - clip_low, 1 + clip_high))
    torch.testing.assert_close(clipped_surrogate(new, old, a, clip_low, clip_high), expected)


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "loss", "gradient"),
    [
        (1.0, 0.0, -1.0, -1.0),  # on policy: the plain policy gradient
        (-2.0, 0.0, 2.0, 2.0),
        (1.0, 0.3, -1.2, 0.0),  # better and already far up: clipped above
        (1.0, -0.3, -0.7408182, -0.7408182),  # better but gone down: pulled back
        (-1.0, -0.3, 0.9, 0.0),  # worse and already far down: clipped below
        (-1.0, 0.3, 1.3498588, 1.3498588),
        (0.0, 0.1, 0.0, 0.0),
    ])
def test_surrogate_and_its_gradient_case_by_case(advantage, log_ratio, loss, gradient):
    new = torch.tensor([log_ratio], requires_grad=True)
    value = clipped_surrogate(new, torch.zeros(1), torch.tensor([advantage]), clip_low=0.1, clip_high=0.2)
    value.sum().backward()
    assert value.item() == pytest.approx(loss, rel=1e-6)
    assert new.grad.item() == pytest.approx(gradient, rel=1e-6)


def test_surrogate_is_per_sample_and_float64_advantages_keep_it_float32():
    new, old = torch.zeros(3, requires_grad=True), torch.zeros(3)
    loss = clipped_surrogate(new, old, torch.tensor([1.0, 0.0, -2.0], dtype=torch.float64), 1e-4, 1e-4)
    assert loss.dtype == torch.float32 and loss.tolist() == [-1.0, 0.0, 2.0]


def test_the_clip_works_where_float32_ratios_no_longer_resolve_it():
    """Clip ranges go down to 1e-6; float32 numbers near 1 are 1.2e-7 (above) and 6e-8 (below) apart."""
    log_ratio = torch.tensor([1.01e-6, 0.99e-6], requires_grad=True)
    clipped_surrogate(log_ratio, torch.zeros(2), torch.ones(2), 1e-6, 1e-6).sum().backward()
    assert log_ratio.grad[0] == 0 and log_ratio.grad[1] == pytest.approx(-1, rel=1e-5)


def test_old_log_probs_and_advantages_carry_no_gradient():
    new, old, advantages = (torch.full((2,), 0.01, requires_grad=True) for _ in range(3))
    clipped_surrogate(new, old, advantages, 0.1, 0.1).sum().backward()
    assert new.grad is not None and old.grad is None and advantages.grad is None


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("index", [0, 2, 3])
def test_ratio_norm_is_guards_published_formula(name, index):
    """log ratio = (log p_new - log p_old + mean((mean_new - mean_old)^2) / (2 s^2)) s, each sample for itself."""
    x, v, step, noise = (t.double() for t in draws(4))
    new, old, x_next = _transitions_in_double(name, index, x, v, step, noise)
    s = float(old.std)
    bias = ((new.mean - old.mean) ** 2).flatten(1).mean(1) / (2 * s**2)
    published = (_log_prob(new, x_next) - _log_prob(old, x_next) + bias) * s
    ours = ratio_norm_log_ratio(noise, new.mean, x_next - old.std * noise)
    torch.testing.assert_close(ours.double(), published, rtol=1e-3, atol=1e-6)
    assert ours.shape == (4,) and ours.std() > 1e-4  # per sample: a mean over the batch would make them equal


def _transitions_in_double(name, index, x, v, step, noise):
    kernel = get_kernel(name, noise_level=0.7)
    old = kernel.transition(x, v, SIGMAS, index)
    new = kernel.transition(x, v + 0.05 * step, SIGMAS, index)
    return new, old, old.mean.double() + old.std.double() * noise


def _log_prob(transition, x_next):
    normal = torch.distributions.Normal(transition.mean.double(), transition.std.double())
    return normal.log_prob(x_next).flatten(1).mean(1)


def test_ratio_norm_is_zero_on_policy_up_to_rounding_and_its_gradient_is_the_noise():
    x, v, noise = draws(3, shape=(2, 4096))
    transition = get_kernel("flow_sde", noise_level=0.7).transition(x, v, SIGMAS, 2)
    mean_old = transition.sample(noise) - transition.std * noise
    mean_new = transition.mean.clone().requires_grad_()
    log_ratio = ratio_norm_log_ratio(noise, mean_new, mean_old)
    assert log_ratio.abs().max() < 1e-8  # the tightest published clip range is 2e-6
    log_ratio.sum().backward()
    torch.testing.assert_close(mean_new.grad, noise / 4096)


@pytest.mark.parametrize("name", KERNELS)
def test_kl_per_step_is_the_kl_of_the_two_gaussians(name):
    x, v, step = draws(3)
    kernel = get_kernel(name, noise_level=0.7)
    new, reference = kernel.transition(x, v, SIGMAS, 2), kernel.transition(x, v + 0.1 * step, SIGMAS, 2)
    exact = torch.distributions.kl_divergence(
        torch.distributions.Normal(new.mean, new.std), torch.distributions.Normal(reference.mean, reference.std))
    value = kl("per_step", new, reference, v, v + 0.1 * step)
    assert value.shape == (4,)
    torch.testing.assert_close(value, exact.flatten(1).mean(1), rtol=1e-4, atol=1e-7)


def test_kl_per_time_is_per_step_times_the_time():
    x, v, step = draws(3)
    kernel = get_kernel("flow_sde", noise_level=0.7)
    pair = kernel.transition(x, v, SIGMAS, 2), kernel.transition(x, v + 0.1 * step, SIGMAS, 2)
    per_time, per_step = (kl(kind, *pair, v, v + 0.1 * step) for kind in ("per_time", "per_step"))
    torch.testing.assert_close(per_time, per_step * 0.25)  # -Delta = 0.75 - 0.5
    rate = float(pair[0].rate_std)
    torch.testing.assert_close(per_time, ((pair[0].mean - pair[1].mean) ** 2).mean(dim=(1, 2)) / (2 * rate**2))


def test_kl_of_velocities_is_their_mean_square():
    x, v, other = draws(3)
    step = get_kernel("flow_sde", noise_level=0.7).transition(x, v, SIGMAS, 2)
    torch.testing.assert_close(kl("velocity", step, step, v, other), ((v - other) ** 2).mean(dim=(1, 2)))


@pytest.mark.parametrize("kind", ["per_time", "per_step", "velocity"])
def test_kl_pulls_the_policy_and_leaves_the_reference(kind):
    x, v, other = draws(3)
    v, other = v.requires_grad_(), other.requires_grad_()
    kernel = get_kernel("flow_sde", noise_level=0.7)
    value = kl(kind, kernel.transition(x, v, SIGMAS, 2), kernel.transition(x, other, SIGMAS, 2), v, other)
    value.sum().backward()
    assert (value > 0).all() and other.grad is None
    assert ((v.detach() - other.detach()) * v.grad).sum() > 0  # downhill is towards the reference


def test_kl_without_noise_or_of_no_known_kind_is_refused():
    x, v = draws(2)
    last = get_kernel("cps", noise_level=0.7).transition(x, v, SIGMAS, 4)
    with pytest.raises(ConfigError, match="sampling.window"):
        kl("per_step", last, last, v, v)
    with pytest.raises(ConfigError, match="did you mean per_step"):
        kl("per_stp", last, last, v, v)
