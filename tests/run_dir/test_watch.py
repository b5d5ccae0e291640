"""What a run gains and what it loses, on constructed series."""

import logging

import numpy as np
import pytest

from flowgrpo_ray.config import load
from flowgrpo_ray.data.plan import plan_step
from flowgrpo_ray.data.prompts import PromptRecord
from flowgrpo_ray.data.trajectory import GroupScores
from flowgrpo_ray.run_dir import watch
from flowgrpo_ray.run_dir.recorder import step_row, weighted_total


def config(combine="gdpo", **weights):
    return {"rewards": {name: {"weight": weight} for name, weight in weights.items()}, "advantage": {"combine": combine}}


def training(steps, noise=0.0, **curves):
    """Rows of a run whose rewards go from the first to the second number; the third is the spread inside a group."""
    rng, rows = np.random.default_rng(0), []
    for step in range(1, steps + 1):
        row = {"step": step}
        for name, (first, last, spread) in curves.items():
            row[f"reward_mean/{name}"] = first + (last - first) * (step - 1) / (steps - 1) + noise * rng.standard_normal()
            row[f"reward_std/{name}"] = row[f"reward_group_std/{name}"] = spread
        rows.append(row)
    return rows


DARK = {"ocr": (0.45, 0.0, 0.3), "dark": (0.5, 0.6, 0.017)}


def test_gdpo_lifts_a_reward_of_little_spread_over_another():
    (change,) = watch.collapses(training(30, **DARK), config(ocr=1, dark=1))
    assert (change.name, change.source) == ("ocr", "training") and change.lost_share > 0.8
    text = watch.collapse_text(change, config(ocr=1, dark=1))
    assert "lower the weight of dark" in text and "gdpo" in text
    # Under sum the same curves are a run that loses altogether: nothing rises.
    assert watch.collapses(training(30, **DARK), config("sum", ocr=1, dark=1)) == []
    assert watch.collapses(training(30, **DARK), config("sum", ocr=1, dark=9))[0].name == "ocr"


@pytest.mark.parametrize(("curves", "weights"), [
    ({"ocr": (0.4, 0.9, 0.3), "dark": (0.5, 0.6, 0.02)}, {"ocr": 1, "dark": 1}),  # both rise
    ({"ocr": (0.45, 0.35, 0.3), "dark": (0.5, 0.6, 0.02)}, {"ocr": 1, "dark": 1}),  # less than the stated share
    ({"ocr": (0.45, 0.0, 0.3), "dark": (0.5, 0.6, 0.02)}, {"ocr": 0, "dark": 1}),  # a monitor is not optimised
    ({"ocr": (0.45, 0.0, 0.3), "dark": (0.6, 0.5, 0.02)}, {"ocr": 1, "dark": 1}),  # nothing rises
    ({"ocr": (0.45, 0.0, 0.3)}, {"ocr": 1}),
    ({"cost": (0.45, 0.0, 0.3), "dark": (0.5, 0.6, 0.02)}, {"cost": -1, "dark": 1}),  # a fall is what is asked for
    ({"near_zero": (0.01, -0.02, 1.0), "dark": (0.5, 0.6, 0.02)}, {"near_zero": 1, "dark": 1}),  # share of its spread
])
def test_no_collapse(curves, weights):
    assert watch.collapses(training(30, **curves), config(**weights)) == []


def test_a_rise_of_a_reward_with_a_negative_weight_is_a_collapse():
    rows = training(30, cost=(0.2, 0.9, 0.3), dark=(0.5, 0.6, 0.017))
    (change,) = watch.collapses(rows, config(cost=-1, dark=1))
    assert change.name == "cost" and change.gain == pytest.approx(-0.7, abs=0.1)


def test_noise_is_no_collapse():
    rows = training(12, noise=0.2, ocr=(0.4, 0.38, 0.3), dark=(0.5, 0.6, 0.017))
    assert watch.collapses(rows, config(ocr=1, dark=1)) == []


def test_the_evaluation_speaks_first():
    rows = training(30, ocr=(0.45, 0.44, 0.3), dark=(0.5, 0.6, 0.017))
    for row, ocr, dark in ((rows[0], 0.46, 0.5), (rows[-1], 0.05, 0.7)):
        row |= {"eval/policy/ocr": ocr, "eval_std/policy/ocr": 0.3, "eval/policy/dark": dark, "eval_std/policy/dark": 0.1,
                "eval_images/policy": 100.0}
    (change,) = watch.collapses(rows, config(ocr=1, dark=1))
    assert (change.source, change.first, change.last) == ("evaluation", 0.46, 0.05)


def test_monitors_that_fell_come_with_the_largest_loss_first():
    rows = training(20, ocr=(0.4, 0.9, 0.3), reader=(0.4, 0.1, 0.3), sharp=(0.9, 0.8, 0.1), flat=(0.5, 0.5, 0.1))
    found = watch.losses(rows, config(ocr=1, reader=0))
    assert [(change.name, change.weight) for change in found] == [("reader", 0.0), ("sharp", 0.0)]


def test_a_driver_is_warned_once_per_reward(caplog):
    rows = training(30, **DARK)
    with caplog.at_level(logging.WARNING):
        observer = watch.Watch(config(ocr=1, dark=1))
        for row in rows:
            observer.add(row)
    (record,) = caplog.records
    assert "the optimised reward ocr collapses" in record.getMessage()
    caplog.clear()
    again = watch.Watch(config(ocr=1, dark=1), rows[:-1])  # resumed: warned before
    again.add(rows[-1])
    assert caplog.records == []


def test_equal_scores_in_every_group_are_warned_of_once(caplog):
    flat = [{"step": step, "zero_std_group_fraction": 1.0} for step in range(1, 6)]
    with caplog.at_level(logging.WARNING):
        observer = watch.Watch(config(ocr=1))
        for row in [{**flat[0], "zero_std_group_fraction": 0.9}, *flat[:2]]:
            observer.add(row)
        assert caplog.records == []
        for row in flat[2:]:
            observer.add(row)
    (record,) = caplog.records
    assert "in the last 3 steps all images of each group had equal scores" in record.getMessage()
    caplog.clear()
    watch.Watch(config(ocr=1), flat[:-1]).add(flat[-1])  # resumed: warned before
    assert caplog.records == []


def test_a_single_reward_without_a_monitor_gets_a_recommendation():
    assert "type: ocr, weight: 0" in watch.monitor_hint({"rewards": {"ocr": {}}})
    assert "jpeg_compressibility: {weight: 0}" in watch.monitor_hint({"rewards": {"mine": {"python": "a:b"}}})
    assert watch.monitor_hint({"rewards": {"ocr": {}, "reader": {"weight": 0}}}) is None
    assert watch.monitor_hint({}) is None


def test_the_total_is_the_weighted_sum_of_optimised_scores_without_masked_samples():
    settings = load(None, {"rewards": {"ocr": {"weight": 2.0}, "jpeg_compressibility": {"weight": -1.0},
                                       "seen": {"type": "ocr", "weight": 0}},
                           "sampling.group_size": 2, "sampling.micro_batch": 2, "sampling.groups_per_step": 2})
    one = GroupScores({"ocr": np.array([0.5, np.nan]), "jpeg_compressibility": np.array([-1.0, -2.0]),
                       "seen": np.array([9.0, 9.0])}, np.array([True, False]))
    two = GroupScores({"ocr": np.array([0.0, 1.0]), "jpeg_compressibility": np.zeros(2), "seen": np.zeros(2)},
                      np.ones(2, bool))
    np.testing.assert_array_equal(weighted_total(settings, one), [2.0, np.nan])
    row = step_row(settings, plan_step(settings, [PromptRecord("a")], 0), {0: one, 1: two}, {0: np.ones(2), 1: np.ones(2)})
    assert row["reward_total"] == pytest.approx((2 + 0 + 2) / 3)
