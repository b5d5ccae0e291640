"""The reward actor's own methods, without Ray around them."""

from __future__ import annotations

import numpy as np
import pytest

from actors.reward import RewardActor


@pytest.mark.parametrize("function", ["in_place", "unlocks"])
@pytest.mark.parametrize(("shards", "part"), [(1, None), (2, None), (2, (3, 4))])
def test_images_are_read_only_whatever_a_call_is_made_of(function, shards, part):
    actor = RewardActor("mine", f"own_rewards:{function}", {}, self_test=False)
    images, n = [np.full((2, 4, 4, 3), 9, np.uint8) for _ in range(shards)], 2 * shards
    with pytest.raises(ValueError, match="read-only|cannot set WRITEABLE"):
        actor.score(["x"] * n, [{}] * n, None, part, *images)
    assert all((shard == 9).all() for shard in images)
