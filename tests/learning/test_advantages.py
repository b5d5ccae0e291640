"""Advantages against the formula, and the properties that hold for any scores."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from flowgrpo_ray.config.load import from_tree
from flowgrpo_ray.data.trajectory import GroupScores
from flowgrpo_ray.errors import ConfigError
from flowgrpo_ray.learning.advantages import History, combine, group_advantages, needs_whole_step, step_advantages

SCORES = st.integers(2, 5).flatmap(lambda groups: st.integers(2, 6).flatmap(lambda size: arrays(
    np.float64, (groups, size), elements=st.floats(-10, 10, allow_subnormal=False).map(lambda x: round(x, 3)))))


def configuration(**sections):
    return from_tree({"rewards": {"ocr": {"weight": 1.0}}, **sections})


def scores_of(rows, valid=None, **others):
    rows = np.asarray(rows, dtype=np.float64)
    valid = np.ones(rows.shape, bool) if valid is None else np.asarray(valid)
    return {g: GroupScores({"ocr": rows[g], **{name: np.asarray(v, dtype=np.float64)[g] for name, v in others.items()}},
                           valid[g]) for g in range(len(rows))}


def flat(rows):
    return rows.ravel(), np.repeat(np.arange(len(rows)), rows.shape[1])


# group_advantages -----------------------------------------------------------------------------------------------------

def test_the_formula_by_hand():
    rewards, ids = [1.0, 2.0, 6.0, 0.0, 4.0], ["a", "a", "a", "b", "b"]
    spread = np.sqrt(14 / 3)  # population standard deviation of 1, 2, 6
    expected = np.array([-2 / (spread + 1e-4), -1 / (spread + 1e-4), 3 / (spread + 1e-4), -2 / 2.0001, 2 / 2.0001])
    np.testing.assert_allclose(group_advantages(rewards, ids), expected, rtol=1e-14)
    np.testing.assert_allclose(group_advantages(rewards, ids, std="none"), [-2, -1, 3, -2, 2])
    whole = np.std(rewards) + 1e-4
    np.testing.assert_allclose(group_advantages(rewards, ids, std="global"), np.array([-2, -1, 3, -2, 2]) / whole)
    np.testing.assert_allclose(group_advantages(rewards, ids, clip=1.0), np.clip(expected, -1, 1))
    np.testing.assert_allclose(group_advantages(rewards, ids, eps=0.5)[3:], [-2 / 2.5, 2 / 2.5])
    assert group_advantages(rewards, ids).dtype == np.float64


@settings(deadline=None)
@given(rows=SCORES, std=st.sampled_from(["group", "global", "none"]), shift=st.floats(-10, 10, allow_subnormal=False))
def test_shift_invariance_and_zero_sum(rows, std, shift):
    rewards, ids = flat(rows)
    advantages = group_advantages(rewards, ids, std=std)
    for group in range(len(rows)):
        assert abs(advantages[ids == group].sum()) < 1e-6
    shifted = rows + (np.arange(len(rows)) * shift)[:, None]  # each group by its own amount
    if std != "global":  # the spread of all scores does feel such a shift
        np.testing.assert_allclose(group_advantages(shifted.ravel(), ids, std=std), advantages, atol=1e-6)
    np.testing.assert_allclose(group_advantages(rewards + shift, ids, std=std), advantages, atol=1e-6)


@settings(deadline=None)
@given(rows=SCORES, std=st.sampled_from(["group", "global", "none"]), data=st.data())
def test_order_of_samples_does_not_matter(rows, std, data):
    rewards, ids = flat(rows)
    order = np.array(data.draw(st.permutations(range(len(rewards)))))
    moved = group_advantages(rewards[order], ids[order], std=std)
    np.testing.assert_allclose(moved, group_advantages(rewards, ids, std=std)[order], atol=1e-8)


@settings(deadline=None)
@given(rows=SCORES, std=st.sampled_from(["group", "global", "none"]), data=st.data())
def test_masked_samples_take_no_part(rows, std, data):
    rewards, ids = flat(rows)
    valid = data.draw(arrays(bool, len(rewards)))
    spoilt = np.where(valid, rewards, data.draw(st.sampled_from([np.nan, np.inf, -1e30])))
    advantages = group_advantages(spoilt, ids, std=std, valid=valid)
    assert np.isfinite(advantages).all() and (advantages[~valid] == 0).all()
    np.testing.assert_array_equal(advantages[valid], group_advantages(rewards[valid], ids[valid], std=std))


@pytest.mark.parametrize("std", ["group", "global", "none"])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7 + 0.1, 1e-9, 12345.678])
def test_equal_rewards_give_exactly_zero(std, value):
    """The mean of 24 equal numbers may miss them by a bit; divided by eps that would still be a signal."""
    rewards = [value] * 23 + [0.0, 1.0] + [value] * 2
    ids = [0] * 23 + [1, 1] + [2] * 2
    advantages = group_advantages(rewards, ids, std=std)
    assert (advantages[:23] == 0).all() and (advantages[25:] == 0).all() and (advantages[23:25] != 0).all()


def test_sums_that_differ_by_rounding_only_have_no_spread():
    assert (group_advantages([0.1 + 0.2, 0.3], [0, 0]) == 0).all()


def test_rewards_that_cancel_but_for_rounding_give_zero():
    rewards = np.array([0.1, 0.2, 0.7, 0.3, 0.45, 0.8])
    total = combine({"a": rewards, "b": 1 - rewards}, {"a": 1.0, "b": 1.0}, [0] * 6, "gdpo")
    assert (total == 0).all()
    history = History()
    history.update(0, np.array([0.1 + 0.2, 0.3]))
    assert history.stats(0)[2] > 0, "rounding makes a spread"
    config = from_tree({"rewards": {"r": {"python": "m:f"}}, "advantage": {"baseline": "history"}})
    scores = {0: GroupScores({"r": np.array([0.1 + 0.2, 0.3])}, np.ones(2, dtype=bool))}
    assert (step_advantages(config, scores, {0: 0}, step=0, history=History())[0] == 0).all()


def test_fewer_than_two_valid_samples_give_zero():
    valid = [True, False, False, False, True, True]
    advantages = group_advantages([5.0, 1.0, 2.0, 3.0, 0.0, 1.0], [0, 0, 1, 1, 2, 2], valid=valid, std="none")
    assert advantages.tolist() == [0, 0, 0, 0, -0.5, 0.5]
    assert (group_advantages([1.0, 2.0], [0, 0], valid=[False, False], std="global") == 0).all()


def test_a_valid_score_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="sample 1 is valid but not finite"):
        group_advantages([0.0, np.nan], [0, 0])
    with pytest.raises(ValueError, match="3 rewards with 2 group ids"):
        group_advantages([0.0, 1.0, 2.0], [0, 0])
    with pytest.raises(ConfigError, match="did you mean global"):
        group_advantages([0.0, 1.0], [0, 0], std="globl")


# combine --------------------------------------------------------------------------------------------------------------

def test_sum_weighs_raw_scores_and_leaves_monitors_out():
    scores = {"ocr": np.array([1.0, 0.0]), "size": np.array([10.0, 20.0]), "monitor": np.array([np.nan, np.nan])}
    total = combine(scores, {"ocr": 2.0, "size": -0.1, "monitor": 0.0}, [0, 0])
    np.testing.assert_allclose(total, [1.0, -2.0])


def test_gdpo_by_hand():
    scores = {"a": np.array([0.0, 2.0, 1.0, 1.0]), "b": np.array([30.0, 10.0, 0.0, 100.0])}
    total = combine(scores, {"a": 1.0, "b": 0.5}, [0, 0, 1, 1], "gdpo")
    a, b = np.array([-1, 1, 0, 0]) / 1.0001, np.array([10, -10, -50, 50]) / np.array([10.0001] * 2 + [50.0001] * 2)
    expected = (a + 0.5 * b - np.mean(a + 0.5 * b)) / (np.std(a + 0.5 * b) + 1e-4)
    np.testing.assert_allclose(total, expected, rtol=1e-12)


def test_gdpo_does_not_care_for_the_scale_of_a_reward():
    rng = np.random.default_rng(0)
    a, b, ids = rng.normal(size=24), rng.normal(size=24), np.repeat(np.arange(4), 6)
    weights = {"a": 1.0, "b": 1.0}
    plain = combine({"a": a, "b": b}, weights, ids, "gdpo")
    scaled = combine({"a": a, "b": 1000 * b}, weights, ids, "gdpo")
    np.testing.assert_allclose(plain, scaled, rtol=2e-3, atol=1e-3)
    assert abs(plain.std() - 1) < 1e-3
    summed = group_advantages(combine({"a": a, "b": 1000 * b}, weights, ids), ids)
    assert np.abs(summed - plain).max() > 0.5  # where the plain sum lets the large reward take over


def test_gdpo_masks_and_flat_groups_are_exactly_zero():
    scores = {"a": np.array([0.1, 0.1, 0.1, 0.0, 1.0, np.nan])}
    total = combine(scores, {"a": 1.0}, [0, 0, 0, 1, 1, 1], "gdpo", valid=[True] * 5 + [False])
    assert (total[:3] == 0).all() and total[5] == 0 and total[4] == -total[3] > 0
    assert (combine({"a": np.ones(4)}, {"a": 1.0}, [0, 0, 1, 1], "gdpo") == 0).all()


def test_combine_names_what_is_missing():
    with pytest.raises(ValueError, match="no scores of ocr"):
        combine({"size": np.ones(2)}, {"ocr": 1.0}, [0, 0])
    with pytest.raises(ValueError, match="no scores of any reward"):
        combine({"size": np.ones(2)}, {"size": 0.0}, [0, 0])
    with pytest.raises(ConfigError, match="did you mean gdpo"):
        combine({"a": np.ones(2)}, {"a": 1.0}, [0, 0], "gdop")
    with pytest.raises(ValueError, match="size: sample 0"):
        combine({"size": np.array([np.inf, 1.0])}, {"size": 1.0}, [0, 0])


# History --------------------------------------------------------------------------------------------------------------

def test_history_is_the_mean_and_std_of_all_that_was_seen():
    rng, history, seen = np.random.default_rng(0), History(), []
    assert history.stats(7) == (0, 0.0, 0.0)
    for _ in range(5):
        rewards = rng.normal(3.0, 0.5, size=8)
        seen += rewards.tolist()
        history.update(7, rewards)
        history.update(8, np.full(3, 0.1))
        count, mean, std = history.stats(7)
        assert count == len(seen)
        assert (mean, std) == (pytest.approx(np.mean(seen)), pytest.approx(np.std(seen)))
    assert history.stats(8) == (15, pytest.approx(0.1), 0.0)


def test_history_survives_json_bit_for_bit():
    rng, history = np.random.default_rng(0), History()
    history.update(3, rng.normal(size=5))
    copy = History()
    copy.load_state_dict(json.loads(json.dumps(history.state_dict())))
    rewards = rng.normal(size=5)
    history.update(3, rewards)
    copy.update(3, rewards)
    assert copy.stats(3) == history.stats(3)


# step_advantages ------------------------------------------------------------------------------------------------------

def test_step_is_the_groups_formula_with_the_configured_clip():
    rows = np.random.default_rng(0).normal(size=(3, 8))
    rows[1] = [0, 0, 0, 0, 0, 0, 0, 9]
    config = configuration(advantage={"clip_max": 1.5}, rewards={"ocr": {"weight": 2.0}})
    out = step_advantages(config, scores_of(rows), {0: 5, 1: 6, 2: 5}, step=0)
    for group in range(3):
        expected = 2 * (rows[group] - rows[group].mean()) / (2 * rows[group].std() + 1e-4)
        np.testing.assert_allclose(out[group], np.clip(expected, -1.5, 1.5), rtol=1e-12)
    assert out[1].max() == 1.5


def test_groups_of_one_prompt_stay_apart():
    rows = [[0.0, 1.0], [10.0, 11.0]]
    out = step_advantages(configuration(), scores_of(rows), {0: 4, 1: 4}, step=0)
    np.testing.assert_array_equal(out[0], out[1])


@pytest.mark.parametrize(
    ("advantage", "whole"),
    [({"std": "group"}, False), ({"std": "none"}, False), ({"std": "global"}, True), ({"combine": "gdpo"}, True),
     ({"baseline": "history"}, True), ({"control": "shuffled"}, True)])
def test_needs_whole_step_is_true_where_other_groups_matter(advantage, whole):
    """The predicate against the fact: compute a group alone and in company."""
    config = configuration(advantage=advantage)
    assert needs_whole_step(config) is whole
    rows = np.random.default_rng(0).normal(size=(4, 8)) * np.array([[1.0], [5.0], [0.2], [3.0]])
    scores, prompts = scores_of(rows), dict.fromkeys(range(4), 1)

    def compute(groups):
        return step_advantages(config, {g: scores[g] for g in groups}, prompts, step=0, history=History())

    together = compute([0, 1, 2, 3])
    alone = {group: compute([group])[group] for group in range(4)}
    same = all(np.array_equal(together[group], alone[group]) for group in range(4))
    assert same is not whole


@pytest.mark.parametrize(
    "advantage",
    [{"std": "global"}, {"combine": "gdpo"}, {"baseline": "history"}, {"control": "shuffled"}, {"std": "group"}])
def test_the_order_in_which_scores_arrived_changes_no_bit(advantage):
    config, rows = configuration(advantage=advantage), np.random.default_rng(0).normal(size=(4, 6))
    scores, prompts = scores_of(rows), {0: 9, 1: 2, 2: 9, 3: 1}
    there = step_advantages(config, scores, prompts, step=3, history=History())
    back = step_advantages(config, dict(reversed(scores.items())), prompts, step=3, history=History())
    for group in range(4):
        np.testing.assert_array_equal(there[group], back[group])


def test_history_baseline_compares_with_all_that_the_prompt_ever_got():
    config, history = configuration(advantage={"baseline": "history"}), History()
    step_advantages(config, scores_of([[0.0, 0.2]]), {0: 9}, step=0, history=history)
    out = step_advantages(config, scores_of([[1.0, 0.8], [0.5, 0.5]]), {0: 9, 1: 4}, step=1, history=history)
    seen = np.array([0.0, 0.2, 1.0, 0.8])
    np.testing.assert_allclose(out[0], (np.array([1.0, 0.8]) - seen.mean()) / (seen.std() + 1e-4), rtol=1e-9)
    assert (out[0] > 0).all()  # a group that is good throughout is still rewarded
    assert (out[1] == 0).all()  # no spread in this prompt's history
    out = step_advantages(config, scores_of([[0.7, 0.7]]), {0: 9}, step=2, history=history)
    assert (out[0] > 0).all()  # without spread in the group, but the history has some
    with pytest.raises(ValueError, match="running statistics"):
        step_advantages(config, scores_of([[0.0, 1.0]]), {0: 0}, step=0)


def test_history_leaves_masked_samples_out():
    config, history = configuration(advantage={"baseline": "history"}), History()
    out = step_advantages(
        config, scores_of([[0.0, 1.0, np.nan]], valid=[[True, True, False]]), {0: 9}, step=0, history=history)
    assert history.stats(9)[:2] == (2, 0.5) and out[0][2] == 0


def test_shuffled_control_permutes_the_valid_advantages_of_the_step():
    rows = np.random.default_rng(0).normal(size=(5, 8))
    valid = np.random.default_rng(1).random((5, 8)) < 0.8
    scores, prompts = scores_of(rows, valid), dict.fromkeys(range(5), 0)
    plain = step_advantages(configuration(), scores, prompts, step=2)
    config = configuration(advantage={"control": "shuffled"})
    shuffled = step_advantages(config, scores, prompts, step=2)

    def values(advantages):
        return np.concatenate([advantages[group][valid[group]] for group in range(5)])

    assert all((shuffled[group][~valid[group]] == 0).all() for group in range(5))
    np.testing.assert_array_equal(np.sort(values(shuffled)), np.sort(values(plain)))
    assert (values(shuffled) != values(plain)).mean() > 0.8
    again = step_advantages(config, scores, prompts, step=2)
    np.testing.assert_array_equal(values(again), values(shuffled))
    assert (values(step_advantages(config, scores, prompts, step=3)) != values(shuffled)).any()
    config = configuration(advantage={"control": "shuffled"}, train={"seed": 7})
    assert (values(step_advantages(config, scores, prompts, step=2)) != values(shuffled)).any()


def test_several_rewards_and_monitors():
    rows, sizes = [[0.0, 1.0, 0.5, 0.2]], [[-30.0, -10.0, -20.0, -20.0]]
    scores = scores_of(rows, jpeg_compressibility=sizes)
    both = configuration(rewards={"ocr": {"weight": 1.0}, "jpeg_compressibility": {"weight": 0.01}})
    expected = group_advantages(np.array(rows[0]) + 0.01 * np.array(sizes[0]), [0] * 4)
    np.testing.assert_allclose(step_advantages(both, scores, {0: 0}, step=0)[0], expected, rtol=1e-12)
    monitor = configuration(rewards={"ocr": {"weight": 1.0}, "jpeg_compressibility": {"weight": 0.0}})
    unread = scores_of(rows, jpeg_compressibility=[[np.nan] * 4])
    np.testing.assert_array_equal(
        step_advantages(monitor, unread, {0: 0}, step=0)[0], group_advantages(rows[0], [0] * 4))
    with pytest.raises(ValueError, match="group 0 has no scores of jpeg_compressibility; it has ocr"):
        step_advantages(both, scores_of(rows), {0: 0}, step=0)
