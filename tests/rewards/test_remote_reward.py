import datetime
import decimal
import json

import numpy as np
import pytest
from answering import Server, serving

from flowgrpo_ray import rewards
from flowgrpo_ray.errors import ConfigError
from flowgrpo_ray.rewards import RewardError
from flowgrpo_ray.rewards.http_client import from_png, to_base64, to_png

HEALTH = {"name": "served", "range": [0, None], "scope": "sample"}
RED_AND_BLUE = np.zeros((2, 4, 6, 3), np.uint8)
RED_AND_BLUE[0, ..., 0] = RED_AND_BLUE[1, ..., 2] = 255


def mean_red(body):
    """Scores of a request as a server could give them: the mean of the red channel over 255."""
    images = [from_png(text, max_pixels=10_000) for text in body["images"]]
    return [float(image[..., 0].mean() / 255) for image in images]


def reward_server(health=HEALTH, scores=lambda body: {"served": mean_red(body)}, self_test=(404, {})):
    def answer(method, path, body):
        if path == "/health":
            return 200, health
        if path == "/v1/self_test":
            return self_test
        reply = scores(body)
        return reply if isinstance(reply, tuple) else (200, {"scores": reply})

    return serving(answer)


def remote(server, name="remote", **options):
    return rewards.get(name, url=server.url, **{"retries": 1, "backoff_s": 0.0, "timeout_s": 5.0} | options)


def score(reward, images=RED_AND_BLUE, metadata=None):
    n = len(images)
    return reward.score(images, [f"prompt {i}" for i in range(n)], metadata or [{}] * n, group_ids=[0] * n)


def test_scores_arrive_under_the_client_s_name_with_the_monitors():
    with reward_server(scores=lambda body: {"served": mean_red(body), "served_exact": [1, 0], "other": [0.25, 0.5]}) as server:
        found = score(remote(server), metadata=[{"tag": "x"}, {}])
        body = server.requests[-1][2]
    assert list(found) == ["remote", "remote_exact", "remote_other"]
    assert all(values.dtype == np.float32 for values in found.values())
    assert found["remote"].tolist() == [1, 0] and found["remote_other"].tolist() == [0.25, 0.5]
    assert body["prompts"] == ["prompt 0", "prompt 1"] and body["metadata"] == [{"tag": "x"}, {}]
    assert body["group_ids"] == [0, 0]
    assert np.array_equal(from_png(body["images"][0], max_pixels=100), RED_AND_BLUE[0])


def test_requests_hold_batch_size_images_or_what_the_server_takes():
    images = np.random.default_rng(0).integers(0, 256, (7, 4, 4, 3), np.uint8)
    expected = [np.float32(image[..., 0].mean() / 255) for image in images]
    for health, options, sizes in [(HEALTH, {"batch_size": 3}, [3, 3, 1]), (HEALTH | {"max_batch": 5}, {}, [5, 2])]:
        with reward_server(health) as server:
            assert np.array_equal(score(remote(server, **options), images)["remote"], expected)
            assert [len(body["images"]) for _, path, body, _ in server.requests if path == "/v1/score"] == sizes
            assert [p for _, path, body, _ in server.requests if path == "/v1/score" for p in body["prompts"]] == [
                f"prompt {i}" for i in range(7)]


def test_the_score_to_take_can_be_named():
    with reward_server(scores=lambda body: {"served": [0, 0], "served_soft": [1, 2]}) as server:
        assert score(remote(server, score="served_soft"))["remote"].tolist() == [1, 2]
        with pytest.raises(RewardError, match="no score 'served_sof'; did you mean served_soft"):
            score(remote(server, score="served_sof"))


def test_range_is_the_server_s():
    with reward_server() as server:
        assert remote(server).range == (0, np.inf)
    assert rewards.reward_class("remote").range == (-np.inf, np.inf)


@pytest.mark.parametrize(("reply", "message"), [
    ({"served": [0.5]}, "is 1 score for 2 images"),
    ({"served": []}, "is 0 scores for 2 images"),
    ({"served": [0.5] * 3}, "is 3 scores for 2 images"),
    ({"served": [0.5, None]}, r"is None, no score, at \[1\] of 2 images"),
    ({"served": [True, 0.5]}, "is True, no score"),
    ({"served": ["1", 0.5]}, "is '1', no score"),
    ({"served": 0.5}, "is a float for 2 images"),
    ({"served": [0.5, 0.5], "served_exact": [0]}, "'served_exact' from .* is 1 score for 2 images"),
    ({"other": [1, 2]}, "gives no score 'served'"),
    ({}, 'has no "scores"'),
    ((200, [1, 2]), 'has no "scores"'),
    ((200, b'{"scores": {"served": [NaN, 1]}}'), "is no JSON .*NaN"),
    ((200, b'{"scores": {"served": [1e999, 1]}}'), "is inf, no score"),
    ((200, b'{"scores": {"served": [1' + b"0" * 400 + b', 1]}}'), r"from http://\S+ is 1000.* \(401 characters\), no score"),
    ({"served": [-1e13, 1]}, "is -10000000000000.0, no score"),
    ((200, b"[" * 100_000 + b"]" * 100_000), r"http://\S+/v1/score is no JSON \(nested too deeply\)"),
    ({"served": [1, 1], "x": [1, 1], "served_x": [0, 0]}, "http://.* gives the scores 'x' and 'served_x', .* named remote_x"),
    ((200, b"all good"), "is no JSON"),
    ((500, {"error": {"message": "RewardError: no glyphs"}}), "HTTP 500: RewardError: no glyphs"),
    ((400, {"error": {"field": "prompts[0]", "message": "no quotes"}}), r"prompts\[0\]: no quotes"),
    ((503, {"error": {"message": "full"}}), r"HTTP 503: full \(tried 2 times\)"),
    ((200, Server.CLOSE), r"lost.*\(tried 2 times\)"),
])
def test_what_is_no_score_is_an_error_and_never_a_0(reply, message):
    with reward_server(scores=lambda body: reply) as server, pytest.raises(RewardError, match=message):
        score(remote(server))


def test_a_server_that_hangs_is_an_error():
    with reward_server(scores=lambda body: (200, Server.HANG)) as server:
        reward = remote(server, timeout_s=0.2)
        with pytest.raises(RewardError, match="no answer from .*/v1/score within 0.2 s"):
            score(reward)
        assert server.count("/v1/score") == 1


def test_a_server_that_is_busy_for_a_while_is_waited_for():
    replies = [(503, {}), {"served": [3, 4]}]
    with reward_server(scores=lambda body: replies.pop(0)) as server:
        assert score(remote(server))["remote"].tolist() == [3, 4]


def test_other_scores_from_batch_to_batch_are_an_error():
    replies = [{"served": [1]}, {"served": [1], "more": [1]}]
    with reward_server(scores=lambda body: replies.pop(0)) as server, pytest.raises(RewardError, match="names other scores"):
        score(remote(server, batch_size=1))


@pytest.mark.parametrize(("health", "message"), [
    ([], 'no "name"'),
    ({"status": "ok"}, 'no "name"'),
    (HEALTH | {"range": None}, '"range" is None'),
    (HEALTH | {"range": [0, "1"]}, '"range" is'),
    (HEALTH | {"scope": "pair"}, '"scope" is \'pair\''),
    (HEALTH | {"max_batch": 0}, '"max_batch" is 0'),
    (HEALTH | {"max_batch": 1.5}, '"max_batch" is 1.5'),
    (HEALTH | {"max_batch": "4"}, '"max_batch" is \'4\''),
    (HEALTH | {"range": [0, 10**400]}, '"range" is .* characters'),
    (HEALTH | {"range": [1, 0]}, r'"range" is \[1, 0\]'),
    (b'{"name": "served", "scope": "sample", "range": [0, 1e400]}', r'"range" is \[0, inf\]'),
    (b'{"name": "served", "scope": "sample", "range": [0, 1], "max_batch": 1e400}', '"max_batch" is inf'),
    (HEALTH | {"scope": "group"}, "serves served, which is scored per group; use the reward remote_group"),
])
def test_what_is_no_reward_server_is_named_at_construction(health, message):
    with reward_server(health) as server:
        with pytest.raises(RewardError, match=message) as error:
            remote(server)
    assert server.url in str(error.value)


def test_a_server_that_is_not_there_is_named_at_construction():
    with reward_server() as server:
        pass
    with pytest.raises(RewardError, match=f"{server.url}/health: .*refused"):
        remote(server)


@pytest.mark.parametrize(("options", "message"), [
    ({}, "option url is needed"),
    ({"url": "localhost:80"}, "option url is 'localhost:80', not of the form"),
    ({"url": "http://x", "retries": -1}, "option retries is -1"),
    ({"url": "http://x", "timeout_s": 1e10}, "option timeout_s is 10000000000.0; use at most"),
    ({"url": "http://[::1"}, "option url is 'http://[::1', not of the form"),
    ({"url": "http://x", "timeout": 3}, "did you mean timeout_s"),
])
def test_wrong_options_are_named_before_anything_starts(options, message):
    (problem,) = rewards.option_problems("remote", options)
    assert message in problem
    with pytest.raises(ConfigError):
        rewards.get("remote", **options)


def groups_server(**more):
    return reward_server(HEALTH | {"scope": "group"} | more, scores=lambda body: {"served": body["group_ids"]})


def test_a_group_goes_out_whole():
    images = np.zeros((5, 4, 4, 3), np.uint8)
    with groups_server() as server:
        reward = remote(server, "remote_group", batch_size=2)
        assert reward.scope == "group"
        found = reward.score(images, ["p"] * 5, [{}] * 5, group_ids=np.full(5, 7))
        assert found["remote_group"].tolist() == [7] * 5 and server.count("/v1/score") == 1
    with groups_server(max_batch=4) as server, pytest.raises(RewardError, match="a group of 5 images.*takes 4 at a time"):
        score(remote(server, "remote_group"), images)
    with reward_server() as server, pytest.raises(RewardError, match="use the reward remote"):
        remote(server, "remote_group")


@pytest.mark.parametrize(("value", "shown"), [
    (datetime.datetime(2026, 1, 2), "datetime.datetime(2026, 1, 2, 0, 0)"), (float("nan"), "nan"), (b"x", "b'x'"),
    ([1, {"a": -np.inf}], "-inf"), (decimal.Decimal("0.1"), "Decimal('0.1')"), ({(1, 2): 3}, "{(1, 2): 3}"),
])
@pytest.mark.parametrize("name", ["remote", "remote_group", "deqa", "geneval"])
def test_metadata_that_json_does_not_have_is_found_before_the_start(name, value, shown):
    geneval = {"tag": "single_object", "include": [{"class": "dog", "count": 1}]}
    check = rewards.reward_class(name).check_prompt
    problem = check("a dog", geneval | {"made": value}, url="http://x")
    assert "metadata 'made' is " in problem and shown in problem and len(problem) < 400
    assert check("a dog", geneval | {"made": ["2026", 1, None, {"a": 0.5}]}, url="http://x") is None
    if name == "geneval":
        assert check("a dog", geneval | {"made": value}, detector="x") is None


# Self-test ------------------------------------------------------------------------------------------------------------

def case(ordered=True, images=RED_AND_BLUE):
    return 200, {"images": [to_base64(to_png(image)) for image in images], "prompts": ["", ""], "metadata": [{}, {}],
                 "ordered": ordered}


def test_self_test_sends_the_server_s_own_images():
    with reward_server(self_test=case()) as server:
        remote(server).self_test()
        assert server.count("/v1/score") == 1
    with reward_server(self_test=case(images=RED_AND_BLUE[::-1])) as server:
        with pytest.raises(RewardError, match="from high to low"):
            remote(server).self_test()
        with pytest.raises(RewardError, match="from high to low"):
            remote(server).self_test()
    with reward_server(self_test=case(images=RED_AND_BLUE[::-1], ordered=False)) as server:
        remote(server).self_test()


def test_self_test_holds_the_scores_to_the_server_s_range():
    with reward_server(HEALTH | {"range": [0, 0.5]}, self_test=case()) as server:
        with pytest.raises(RewardError, match=r"outside 0 to 0.5"):
            remote(server).self_test()


def test_a_server_without_images_has_no_self_test():
    for reply in ((404, {}), (200, None)):
        with reward_server(self_test=reply) as server:
            remote(server).self_test()
            assert server.count("/v1/score") == 0


@pytest.mark.parametrize("reply", [
    (200, {"images": 3}), (200, {"images": ["x"], "prompts": [""], "metadata": [{}], "ordered": True}), (500, {}),
    case(images=RED_AND_BLUE[:1]), (200, case()[1] | {"prompts": [1, 2]}), (200, case()[1] | {"metadata": [{}, 3]}),
    (200, case()[1] | {"metadata": []}),
])
def test_a_broken_self_test_is_an_error(reply):
    with reward_server(self_test=reply) as server, pytest.raises(RewardError, match="/v1/self_test"):
        remote(server).self_test()


# deqa -----------------------------------------------------------------------------------------------------------------

def test_deqa_scores_on_the_server_s_scale():
    with reward_server({"name": "deqa", "range": [1, 5], "scope": "sample"}, scores=lambda body: {"deqa": [1, 5]}) as server:
        assert score(remote(server, "deqa"))["deqa"].tolist() == [1, 5]
    with reward_server({"name": "q", "range": [2, 5], "scope": "sample"}, scores=lambda body: {"q": [2, 3]}) as server:
        reward = remote(server, "deqa")
        assert score(reward)["deqa"].tolist() == [2, 3] and reward.range == (2, 5)


@pytest.mark.parametrize(("named", "declared", "shown"), [
    ("ocr", [0, 1], "0 to 1"), ("deqa", [0, 1], "0 to 1"), ("q", [0, None], "0 to inf"), ("q", [None, 5], "-inf to 5"),
    ("deqa", [1, 100], "1 to 100"), ("q", [None, None], "-inf to inf"),
])
def test_deqa_refuses_the_server_of_another_reward(named, declared, shown):
    with reward_server({"name": named, "range": declared, "scope": "sample"}) as server:
        with pytest.raises(RewardError, match=f"reward deqa: {server.url} serves {named}, of the range {shown}: a server of "
                                              "deqa declares a range inside 1 to 5"):
            remote(server, "deqa")
        assert remote(server, "deqa", score="another").range == (1, 5)


def test_the_request_is_plain_json():
    with reward_server() as server:
        score(remote(server))
        assert sorted(json.loads(json.dumps(server.requests[-1][2]))) == ["group_ids", "images", "metadata", "prompts"]
