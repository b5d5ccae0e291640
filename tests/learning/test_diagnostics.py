"""The metrics of an update against plain NumPy in double precision."""

import math

import numpy as np
import pytest
import torch

from flowgrpo_ray.learning.diagnostics import Diagnostics

CPU = torch.device("cpu")


def zeros(n: int) -> torch.Tensor:
    return torch.zeros(n)


def add(sums: Diagnostics, j: int, log_ratio, *, valid=None, weight=1.0, gate=0.0, clip=(0.1, 0.2), loss=None, kl=None):
    log_ratio = torch.as_tensor(log_ratio, dtype=torch.float32)
    n = len(log_ratio)
    valid = torch.ones(n, dtype=torch.bool) if valid is None else torch.tensor(valid)
    loss = zeros(n) if loss is None else torch.tensor(loss)
    kl = zeros(n) if kl is None else torch.tensor(kl)
    sums.add_step(j, log_ratio, loss, kl, valid, weight, torch.tensor(gate), *clip)


def add_samples(sums: Diagnostics, advantages, *, valid=None, weight=1.0):
    advantages = torch.tensor(advantages)
    valid = torch.ones(len(advantages), dtype=torch.bool) if valid is None else torch.tensor(valid)
    sums.add_samples(valid, advantages, weight)


def test_means_are_over_valid_samples_and_window_steps():
    rng = np.random.default_rng(0)
    log_ratios = rng.normal(0, 0.2, (3, 2, 4)).astype(np.float32)  # shards, window steps, samples
    losses, kls = rng.normal(0, 1, (2, 3, 2, 4)).astype(np.float32)
    advantages = np.array([[1.0, -2.0, 0.0, 0.5], [0.0, 0.0, 1.0, 1.0], [3.0, -1.0, -1.0, 0.0]], np.float32)
    valid = np.array([[True, True, True, False], [True, True, True, True], [False, True, True, True]])
    sums = Diagnostics(2, CPU)
    for s in range(3):
        add_samples(sums, advantages[s], valid=valid[s])
        for j in range(2):
            add(sums, j, log_ratios[s, j], valid=valid[s], loss=losses[s, j], kl=kls[s, j])
    metrics = sums.reduce(1)
    chosen = np.broadcast_to(valid[:, None], log_ratios.shape)
    ratios = np.exp(log_ratios.astype(np.float64))
    expected = {
        "valid_samples": 10, "masked_samples": 2, "nonzero_advantages": 6,
        "abs_advantage_mean": np.abs(advantages[valid]).mean(), "policy_loss": losses[chosen].mean(),
        "kl": kls[chosen].mean(), "approx_kl": 0.5 * (log_ratios[chosen].astype(np.float64) ** 2).mean(),
        "clip_fraction_low": (ratios[chosen] < 0.9).mean(), "clip_fraction_high": (ratios[chosen] > 1.2).mean(),
        "clip_fraction": ((ratios[chosen] < 0.9) | (ratios[chosen] > 1.2)).mean(), "first_update_log_ratio_max": 0.0,
    }
    for j in range(2):
        expected |= {f"ratio_mean/{j}": ratios[:, j][valid].mean(), f"ratio_std/{j}": ratios[:, j][valid].std()}
    assert metrics.keys() == expected.keys()
    for key, value in expected.items():
        assert metrics[key] == pytest.approx(value, rel=1e-6, abs=1e-9), key
    assert 0 < metrics["clip_fraction_low"] < metrics["clip_fraction"]


def test_ratios_that_float32_cannot_tell_from_1_are_measured():
    """Clip ranges go down to 1e-6 and ratios move as little."""
    log_ratio = np.array([1.3e-7, -1.3e-7, 4e-8, -4e-8], np.float32)
    sums = Diagnostics(1, CPU)
    add_samples(sums, np.ones(4, np.float32))
    add(sums, 0, log_ratio, clip=(1.1e-7, 1.1e-7))
    metrics = sums.reduce(1)
    assert metrics["ratio_std/0"] == pytest.approx(np.expm1(log_ratio.astype(np.float64)).std(), rel=1e-5)
    assert metrics["ratio_mean/0"] == pytest.approx(1.0, abs=1e-12)
    assert (metrics["clip_fraction_low"], metrics["clip_fraction_high"]) == (0.25, 0.25)
    assert metrics["approx_kl"] == pytest.approx(0.5 * (log_ratio.astype(np.float64) ** 2).mean(), rel=1e-6)


def test_weight_0_counts_for_nothing_but_the_check():
    sums, plain = Diagnostics(1, CPU), Diagnostics(1, CPU)
    for each in (sums, plain):
        add_samples(each, [1.0, -1.0])
        add(each, 0, [0.01, -0.02])
    add_samples(sums, [4.0, 5.0], valid=[True, False], weight=0.0)
    add(sums, 0, [0.5, 0.5], valid=[True, False], weight=0.0, gate=0.25)
    metrics, expected = sums.reduce(1), plain.reduce(1)
    assert metrics.pop("first_update_log_ratio_max") == 0.25 and expected.pop("first_update_log_ratio_max") == 0.0
    assert metrics == expected


def test_masked_samples_may_hold_anything():
    sums = Diagnostics(1, CPU)
    add_samples(sums, [1.0, 0.0], valid=[True, False])
    add(sums, 0, [0.0, math.nan], valid=[True, False], loss=[1.0, math.inf], kl=[0.5, math.nan])
    metrics = sums.reduce(1)
    assert (metrics["policy_loss"], metrics["kl"], metrics["ratio_mean/0"]) == (1.0, 0.5, 1.0)
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("gate", [math.nan, math.inf])
def test_a_check_that_is_no_number_is_above_every_tolerance(gate):
    sums = Diagnostics(1, CPU)
    add(sums, 0, [0.0], gate=gate)
    add(sums, 0, [0.0], gate=0.5)
    assert sums.reduce(1)["first_update_log_ratio_max"] == math.inf


def test_the_check_keeps_the_largest():
    sums = Diagnostics(2, CPU)
    for j, gate in ((0, 0.5), (1, 2.0), (0, 1.0)):
        add(sums, j, [0.0], gate=gate)
    assert sums.reduce(1)["first_update_log_ratio_max"] == 2.0


def test_an_update_without_valid_samples_has_finite_metrics():
    sums = Diagnostics(1, CPU)
    add_samples(sums, [0.0, 0.0], valid=[False, False])
    add(sums, 0, [0.1, 0.2], valid=[False, False])
    metrics = sums.reduce(1)
    assert (metrics["valid_samples"], metrics["masked_samples"], metrics["policy_loss"]) == (0, 2, 0)
    assert all(math.isfinite(value) for value in metrics.values())
