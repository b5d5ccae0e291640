"""The kernels against the papers' formulas, torch.distributions, and the numbers of the published recipes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowgrpo_ray.errors import ConfigError
from flowgrpo_ray.sampling.kernels import KERNELS, get_kernel

NOISY = ("flow_sde", "cps", "dance_sde")


def sd3_sigmas(steps: int = 10, shift: float = 3.0) -> np.ndarray:
    low = shift * 1e-3 / (1 + (shift - 1) * 1e-3)
    t = np.linspace(1.0, low, steps)
    return np.append(shift * t / (1 + (shift - 1) * t), 0.0).astype(np.float32)


def tensors(shape=(3, 4, 5, 5), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(3)]


def paper(name: str, x, v, sigmas, i, a):
    """mean, std and rate_std in the papers' own form, in double precision."""
    x, v = x.double(), v.double()
    sigma, following = float(sigmas[i]), float(sigmas[i + 1])
    delta = following - sigma
    x0 = x - sigma * v
    if name == "flow_sde":
        s = a * math.sqrt(sigma / (1 - (float(sigmas[1]) if sigma == 1 else sigma)))
        mean = x * (1 + s**2 * delta / (2 * sigma)) + v * (1 + s**2 * (1 - sigma) / (2 * sigma)) * delta
        return mean, s * math.sqrt(-delta), s
    if name == "cps":
        s = following * math.sin(a * math.pi / 2)
        return (1 - following) * x0 + math.sqrt(following**2 - s**2) * (x + (1 - sigma) * v), s, s
    mean = x + (v + 0.5 * a**2 * (x - (1 - sigma) * x0) / sigma**2) * delta
    return mean, a * math.sqrt(-delta), a


@pytest.mark.parametrize("name", NOISY)
@pytest.mark.parametrize("a", [0.3, 0.7, 1.0])
def test_equals_the_papers_formula_at_every_step(name, a):
    sigmas, (x, v, _) = sd3_sigmas(), tensors()
    for i in range(10):
        transition = get_kernel(name, noise_level=a).transition(x, v, sigmas, i)
        mean, std, rate_std = paper(name, x, v, sigmas, i, a)
        assert transition.mean.dtype == transition.std.dtype == transition.rate_std.dtype == torch.float32
        torch.testing.assert_close(transition.mean.double(), mean, rtol=2e-6, atol=2e-6)
        assert float(transition.std) == pytest.approx(std, rel=1e-6, abs=1e-9)
        assert float(transition.rate_std) == pytest.approx(rate_std, rel=1e-6, abs=1e-9)
        assert transition.delta == pytest.approx(float(sigmas[i + 1]) - float(sigmas[i]))


def test_numbers_of_the_published_sd3_recipe():
    """Shift 3, 10 steps, a = 0.7: rate, step noise, and |coefficient of v| / noise (the policy gradient's gain)."""
    rows = [
        (1.0000, 3.506, 0.7000, 0.057), (0.9601, 3.435, 0.7430, 0.078), (0.9133, 2.273, 0.5362, 0.129),
        (0.8577, 1.719, 0.4459, 0.188), (0.7904, 1.359, 0.3918, 0.264), (0.7073, 1.088, 0.3528, 0.371),
        (0.6022, 0.861, 0.3191, 0.536), (0.4649, 0.652, 0.2820, 0.825), (0.2780, 0.434, 0.2254, 1.487),
        (0.0089, 0.0664, 0.0063, 1.771),
    ]
    sigmas, kernel = sd3_sigmas(), get_kernel("flow_sde", noise_level=0.7)
    for i, (sigma, rate, std, gain) in enumerate(rows):
        one, none = torch.ones(1, 1), torch.zeros(1, 1)
        transition = kernel.transition(none, one, sigmas, i)  # the mean is now the coefficient of v
        assert sigmas[i] == pytest.approx(sigma, abs=6e-5)
        assert float(transition.rate_std) == pytest.approx(rate, rel=1e-3)
        assert float(transition.std) == pytest.approx(std, rel=5e-3 if i == 9 else 5e-4)
        assert abs(float(transition.mean) / float(transition.std)) == pytest.approx(gain, rel=1e-2)


def test_numbers_of_the_published_flux_recipe():
    """512 px (mu = 0.63), 6 steps, a = 0.9."""
    sigmas = np.array([1, 0.9037, 0.7897, 0.6525, 0.4842, 0.2730, 0], dtype=np.float32)
    kernel, one, none = get_kernel("flow_sde", noise_level=0.9), torch.ones(1, 1), torch.zeros(1, 1)
    noise = [0.900, 0.931, 0.646, 0.506, 0.401, 0.288]
    gain = [0.107, 0.172, 0.298, 0.467, 0.740, 1.331]
    for i in range(6):
        transition = kernel.transition(none, one, sigmas, i)
        assert float(transition.std) == pytest.approx(noise[i], abs=1e-3)
        assert abs(float(transition.mean / transition.std)) == pytest.approx(gain[i], rel=1e-2)


@pytest.mark.parametrize("a", [0.3, 0.7, 0.9])
def test_first_flow_step_from_pure_noise_has_std_a(a):
    x, v, _ = tensors()
    first = get_kernel("flow_sde", noise_level=a).transition(x, v, sd3_sigmas(), 0)
    assert float(first.std) == pytest.approx(a, rel=1e-6)


@settings(deadline=None, max_examples=50)
@given(
    name=st.sampled_from(sorted(KERNELS)), index=st.integers(0, 9), shift=st.floats(1.0, 6.0),
    seed=st.integers(0, 2**31), scale=st.floats(1e-3, 1e3))
def test_without_noise_every_kernel_is_the_euler_step_bit_for_bit(name, index, shift, seed, scale):
    sigmas, (x, v, noise) = torch.from_numpy(sd3_sigmas(shift=shift)), tensors((2, 3, 4), seed)
    transition = get_kernel(name, noise_level=0.0).transition(x * scale, v, sigmas, index)
    euler = x * scale + v * (sigmas[index + 1] - sigmas[index])
    assert torch.equal(transition.mean, euler)
    assert torch.equal(transition.sample(noise), euler)
    assert torch.equal(transition.sample(), euler)
    assert transition.deterministic and float(transition.std) == 0


@pytest.mark.parametrize("name", NOISY)
def test_sample_and_log_prob_are_those_of_a_normal_distribution(name):
    x, v, noise = tensors()
    transition = get_kernel(name, noise_level=0.7).transition(x, v, sd3_sigmas(), 4)
    x_next = transition.sample(noise)
    torch.testing.assert_close((x_next - transition.mean) / transition.std, noise, rtol=1e-4, atol=1e-5)
    normal = torch.distributions.Normal(transition.mean.double(), transition.std.double())
    expected = normal.log_prob(x_next.double()).flatten(1).mean(1)
    assert transition.log_prob(x_next).shape == (3,)
    torch.testing.assert_close(transition.log_prob(x_next).double(), expected, rtol=1e-5, atol=1e-5)


def test_unscaled_log_prob_is_minus_the_mean_square():
    x, v, noise = tensors()
    transition = get_kernel("cps", noise_level=0.8, log_prob="unscaled").transition(x, v, sd3_sigmas(), 4)
    x_next = transition.sample(noise)
    torch.testing.assert_close(transition.log_prob(x_next), -((x_next - transition.mean) ** 2).mean(dim=(1, 2, 3)))


@pytest.mark.parametrize("name", NOISY)
def test_sampling_and_training_get_the_same_bits(name):
    """The sampler runs under no_grad on NumPy sigmas, the learner with gradients on a tensor: the log ratio is 0."""
    sigmas, (x, v, noise) = sd3_sigmas(), tensors()
    kernel = get_kernel(name, noise_level=0.7)
    for i in range(9):
        with torch.inference_mode():
            sampled = kernel.transition(x, v, sigmas, i)
            x_next = sampled.sample(noise)
            old = sampled.log_prob(x_next)
        velocity = v.clone().requires_grad_()
        trained = get_kernel(name, noise_level=0.7).transition(x, velocity, torch.from_numpy(sigmas), i)
        assert torch.equal(trained.mean, sampled.mean)
        assert torch.equal(trained.log_prob(x_next.clone()), old)


@pytest.mark.parametrize("name", NOISY)
def test_gradient_flows_to_the_velocity_and_not_to_x_next(name):
    sigmas, (x, v, noise) = sd3_sigmas(), tensors((2, 3))
    velocity = v.requires_grad_()
    transition = get_kernel(name, noise_level=0.7).transition(x, velocity, sigmas, 5)
    x_next = transition.sample(noise)  # depends on the velocity; only the mean's path may carry a gradient
    (gradient,) = torch.autograd.grad(transition.log_prob(x_next).sum(), velocity)
    unit = get_kernel(name, noise_level=0.7).transition(torch.zeros(1, 1), torch.ones(1, 1), sigmas, 5).mean
    torch.testing.assert_close(gradient, noise * unit / transition.std.detach() / 3, rtol=1e-3, atol=1e-5)


def test_half_precision_inputs_are_taken_to_float32():
    x, v, _ = tensors()
    x, v = x.bfloat16(), v.bfloat16()
    transition = get_kernel("flow_sde", noise_level=0.7).transition(x, v, sd3_sigmas(), 3)
    wide = get_kernel("flow_sde", noise_level=0.7).transition(x.float(), v.float(), sd3_sigmas(), 3)
    assert transition.mean.dtype == torch.float32 and torch.equal(transition.mean, wide.mean)


def test_a_step_without_noise_has_no_log_prob():
    x, v, noise = tensors()
    last = get_kernel("cps", noise_level=0.8).transition(x, v, sd3_sigmas(), 9)
    assert last.deterministic and torch.equal(last.sample(noise), last.mean)
    with pytest.raises(ConfigError, match="sampling.window"):
        last.log_prob(x)
    with pytest.raises(ConfigError, match="sampling.window"):
        get_kernel("ode", noise_level=0.8).transition(x, v, sd3_sigmas(), 3).log_prob(x)
    assert not get_kernel("flow_sde", noise_level=0.8).transition(x, v, sd3_sigmas(), 9).deterministic


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "flow_sd"}, "did you mean flow_sde"),
        ({"name": "cps", "log_prob": "gausian"}, "did you mean gaussian"),
        ({"name": "flow_sde", "noise_level": -0.1}, "at least 0"),
        ({"name": "flow_sde", "noise_level": math.nan}, "at least 0"),
        ({"name": "cps", "noise_level": 1.2}, "use 1"),
    ])
def test_wrong_choices_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        get_kernel(**arguments)


def test_wrong_steps_and_shapes_are_refused():
    x, v, noise = tensors()
    kernel = get_kernel("flow_sde", noise_level=0.7)
    for index in (-1, 10):
        with pytest.raises(IndexError, match="10 steps"):
            kernel.transition(x, v, sd3_sigmas(), index)
    with pytest.raises(ValueError, match="has to fall"):
        kernel.transition(x, v, sd3_sigmas()[::-1], 3)
    with pytest.raises(ValueError, match="shape"):
        kernel.transition(x, v[:1], sd3_sigmas(), 3)  # would broadcast
    with pytest.raises(ValueError, match="shape"):
        kernel.transition(x, v, sd3_sigmas(), 3).sample(noise[:1])
