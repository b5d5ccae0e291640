import json
from collections import Counter

import numpy as np
import pytest
from test_vlm_judge import RED_AND_BLUE, endpoint, images_of, judge, text_of, whole

from flowgrpo_ray import rewards
from flowgrpo_ray.rewards import RewardError
from flowgrpo_ray.rewards.vlm_preference import pairs_of


def greys(*levels):
    return np.stack([np.full((4, 4, 3), level, np.uint8) for level in levels])


def brighter(body):
    first, second = (int(image[0, 0, 0]) for image in images_of(body))
    return json.dumps({"better": "first" if first > second else "second" if second > first else "tie"})


def rates(server, images, ids=None, prompts=None, **options):
    reward = judge(server, "vlm_preference", **options)
    n = len(images)
    found = reward.score(images, prompts or ["p"] * n, [{}] * n, group_ids=[0] * n if ids is None else ids)
    assert list(found) == ["vlm_preference"] and found["vlm_preference"].dtype == np.float32
    return found["vlm_preference"].tolist()


def test_win_rates_are_those_of_all_pairs():
    with endpoint(brighter) as server:
        assert rates(server, greys(10, 200, 90, 150, 30)) == [0, 1, 0.5, 0.75, 0.25]
        assert server.count("/v1/chat/completions") == 2 * 10


def test_ties_are_half_a_win():
    with endpoint(brighter) as server:
        assert rates(server, greys(10, 90, 90)) == [0, 0.75, 0.75]


def test_a_liking_for_the_first_place_cancels_out():
    with endpoint(lambda body: '{"better": "first"}') as server:
        assert rates(server, greys(1, 2, 3, 4)) == [0.5] * 4


def test_each_pair_is_shown_in_both_orders_with_the_prompt():
    with endpoint(brighter) as server:
        rates(server, greys(10, 20), prompts=["a grey wall"] * 2, concurrency=1)
        bodies = [body for _, path, body, _ in server.requests if path == "/v1/chat/completions"]
    assert [[int(p[0, 0, 0]) for p in images_of(body)] for body in bodies] == [[10, 20], [20, 10]]
    assert all("a grey wall" in text_of(body) for body in bodies)
    assert bodies[0]["response_format"]["json_schema"]["schema"]["properties"] == {
        "better": {"type": "string", "enum": ["first", "second", "tie"]}}


def test_groups_are_judged_apart_and_keep_their_places():
    with endpoint(brighter) as server:
        found = rates(server, greys(10, 255, 20, 250, 30), ids=[7, 3, 7, 3, 7], prompts=["a", "b", "a", "b", "a"])
    assert found == [0, 1, 0.5, 0, 1]


@pytest.mark.parametrize("n", range(2, 26))
def test_pairs_are_all_or_spread_evenly(n):
    everything = pairs_of(n, None)
    assert sorted(everything) == [(i, j) for i in range(n) for j in range(i + 1, n)]
    for most in range((n + 1) // 2, len(everything) + 1):
        chosen = pairs_of(n, most)
        assert chosen == everything[:most]
        games = Counter(i for pair in chosen for i in pair)
        assert len(games) == n and max(games.values()) - min(games.values()) <= 2


def test_max_pairs_bounds_the_work():
    with endpoint(brighter) as server:
        found = rates(server, greys(10, 200, 90, 150), max_pairs=2)
        assert found == [0, 1, 0, 1] and server.count("/v1/chat/completions") == 4
        with pytest.raises(RewardError, match="max_pairs 2 leaves images of a group of 5 out; use at least 3"):
            rates(server, greys(1, 2, 3, 4, 5), max_pairs=2)


@pytest.mark.parametrize("reply", [
    (200, whole('{"better": "first"}', "length")), '{"better": "first", "better": "second"}', '{"better": 1.0}',
    '{"better": "neither"}', '{"better": true}', '{"better": null}', "first", "", '{"best": "first"}',
])
def test_a_reply_without_a_verdict_fails_the_group(reply):
    with endpoint(lambda body: reply) as server, pytest.raises(RewardError, match="images 0 and 1: "):
        rates(server, greys(1, 2))


@pytest.mark.parametrize(("reply", "expected"), [("Image 1", [0.5, 0.5]), ("2", [0.5, 0.5]), ("TIE", [0.5, 0.5])])
def test_other_words_for_a_verdict(reply, expected):
    with endpoint(lambda body: f"I say: {reply}.") as server:
        assert rates(server, greys(1, 2), parser=r"regex:say: (.*)\.") == expected


def test_a_verdict_in_words_is_the_last_one_where_that_begins_a_line():
    options = {"parser": "regex:(?i)(first|second|image [12])", "prompts": ["p"] * 2}
    with endpoint(lambda body: "The first is good, the second is better.") as server:
        with pytest.raises(RewardError, match="images 0 and 1: .*it says 'first' and 'second'"):
            rates(server, greys(1, 2), **options)
    with endpoint(lambda body: "The first is good.\n**Second**, as it is grey.") as server:
        assert rates(server, greys(1, 2), **options) == [0.5, 0.5]
    with endpoint(lambda body: "Image 12") as server, pytest.raises(RewardError, match="only a part of 'Image 12'"):
        rates(server, greys(1, 2), **options)


def test_what_is_no_group_is_refused():
    with endpoint(brighter) as server:
        reward = judge(server, "vlm_preference")
        for ids, prompts, message in [(None, "pp", "was given no group_ids"), ([0], "pp", "1 group_ids for 2"),
                                      ([0, 1], "pp", "this one has 1"), ([0, 0], "pq", "have different prompts")]:
            with pytest.raises(RewardError, match=message):
                reward.score(RED_AND_BLUE, list(prompts), [{}, {}], group_ids=ids)


def test_contract():
    cls = rewards.reward_class("vlm_preference")
    assert cls.scope == "group" and cls.range == (0, 1)
    for options, message in [({"template": "which?"}, "lacks {prompt}"), ({"parser": "number"}, "option parser is 'number'")]:
        (problem,) = rewards.option_problems("vlm_preference", {"base_url": "http://x/v1"} | options)
        assert message in problem
    with endpoint(brighter) as server:
        judge(server, "vlm_preference").self_test()  # red is brighter than blue in its first channel
    with endpoint(lambda body: '{"better": "second"}') as server, pytest.raises(RewardError, match="from high to low"):
        judge(server, "vlm_preference").self_test()
