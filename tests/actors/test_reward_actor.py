"""The reward actor's own methods, without Ray around them."""

from __future__ import annotations

import pickle
import re

import numpy as np
import pytest

from actors.reward import FirstCall, RewardActor
from flowgrpo_ray.rewards import RewardError


@pytest.mark.parametrize("function", ["in_place", "unlocks"])
@pytest.mark.parametrize(("shards", "part"), [(1, None), (2, None), (2, (3, 4))])
def test_images_are_read_only_whatever_a_call_is_made_of(function, shards, part):
    actor = RewardActor("mine", f"own_rewards:{function}", {}, self_test=False)
    images, n = [np.full((2, 4, 4, 3), 9, np.uint8) for _ in range(shards)], 2 * shards
    with pytest.raises(ValueError, match="read-only|cannot set WRITEABLE"):
        actor.score(["x"] * n, [{}] * n, None, part, *images)
    assert all((shard == 9).all() for shard in images)


FIRST = FirstCall('the word "CAT"', {}, images=4, height=8, width=16)


@pytest.mark.parametrize(("spec", "message"), [
    ("own_rewards:reads_a_target",
     r"reward mine: its self-test \(4 made-up images of 16 x 8 with the prompt 'the word \"CAT\"'\) fails: KeyError: 'target' "
     r"\(\S*own_rewards.py, line \d+\)$"),
    ("own_rewards:leaves", "fails: .*sys.exit|called sys.exit"),
    ("own_rewards:too_few", r"'too_few' has shape \[3\], not \[4\] as the images, in its self-test"),
    ("own_rewards:hopeless", r"fails: ValueError: no image is good enough \(\S*own_rewards.py, line \d+\)$"),
])
def test_a_bug_of_the_users_own_reward_is_found_at_the_start(spec, message):
    with pytest.raises(RewardError, match=message):
        RewardActor("mine", spec, {}, first_call=FIRST)
    RewardActor("mine", spec, {}, self_test=False, first_call=FIRST)
    RewardActor("mine", spec, {})


@pytest.mark.parametrize("spec", [
    "own_rewards:brightness", "own_rewards:rank_in_group", "own_rewards:declines", "own_rewards:Limited"])
def test_a_sound_reward_passes_its_first_call(spec):
    RewardActor("mine", spec, {}, first_call=FIRST)


def test_the_known_images_are_known_and_not_flat():
    images = FIRST.known_images()
    assert images.shape == (4, 8, 16, 3) and images.dtype == np.uint8
    assert (images.std(axis=(1, 2, 3)) > 10).all() and (images == FIRST.known_images()).all()
    assert len({image.tobytes() for image in images}) == 4


def test_an_error_of_the_users_own_code_carries_its_place_to_the_driver():
    actor = RewardActor("mine", "own_rewards:faulty_everywhere", {}, self_test=False)
    with pytest.raises(IndexError) as caught:
        actor.score(["x"], [{}], None, None, np.zeros((1, 4, 4, 3), np.uint8))
    (note,) = pickle.loads(pickle.dumps(caught.value)).__notes__
    assert re.fullmatch(r"raised in \S*own_rewards.py, line \d+", note)
