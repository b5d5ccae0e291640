"""Rewards behind HTTP in real reward actors: every fault of a server is a missing score, and pixels arrive as they were."""

from __future__ import annotations

import base64
import contextlib
import io
import json

import numpy as np
import own_rewards
import pytest
from answering import Server, serving
from PIL import Image
from scoring_bench import Bench, config_of, random_images

from flowgrpo_ray.errors import FlowGrpoError

pytestmark = pytest.mark.timeout(180)


def from_png(text: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(text.rpartition(",")[2]))).convert("RGB"))


def is_victim(image: np.ndarray) -> bool:
    return tuple(image[0, 0]) == own_rewards.VICTIM


class RewardService:
    """What a `remote` reward talks to: the share of red, and `fault` where the marked image is in the request."""

    def __init__(self, fault=None, **health):
        self.fault, self.health = fault, {"name": "red", "scope": "sample", "range": [0, 255], "max_batch": None} | health

    def __call__(self, method, path, body):
        if path == "/health":
            return 200, self.health
        if path == "/v1/self_test":
            return 200, None
        images = [from_png(text) for text in body["images"]]
        scores = [float(image[..., 0].mean()) for image in images]
        if self.fault and any(map(is_victim, images)):
            faults = {"500": (500, {"error": "broken"}), "503": (503, {"error": "busy"}), "hang": (200, Server.HANG),
                      "close": (200, Server.CLOSE), "empty": (200, {"scores": {"red": []}}),
                      "short": (200, {"scores": {"red": scores[:-1]}}), "nan": (200, b'{"scores": {"red": [NaN]}}'),
                      "unparsable": (200, b"<html>gateway</html>"), "words": (200, {"scores": {"red": ["good"] * len(scores)}})}
            return faults[self.fault]
        return 200, {"scores": {"red": scores}}


class ChatService:
    """An OpenAI-compatible endpoint that grades the share of red from 1 to 5."""

    def __init__(self, fault=None):
        self.fault = fault

    def __call__(self, method, path, body):
        if path == "/v1/models":
            return 200, {"data": [{"id": "judge"}]}
        (url,) = [part["image_url"]["url"] for message in body["messages"] for part in message["content"]
                  if isinstance(part, dict) and part["type"] == "image_url"]
        image = from_png(url)
        reply = json.dumps({"score": 1 + 4 * float(image[..., 0].mean()) / 255})
        if self.fault and is_victim(image):
            if self.fault in ("500", "hang", "close"):
                return {"500": (500, {"error": {"message": "broken"}}), "hang": (200, Server.HANG),
                        "close": (200, Server.CLOSE)}[self.fault]
            reply = {"empty": "", "unparsable": "I like it", "outside": '{"score": 11}', "nan": '{"score": NaN}'}[self.fault]
        return 200, {"choices": [{"message": {"content": reply}, "finish_reason": "stop"}]}


def test_a_group_that_the_server_does_not_take_is_found_when_the_actor_starts(ray_cluster):
    with serving(RewardService(scope="group", max_batch=4)) as server:
        rewards = {"groups": {"type": "remote_group", "options": {"url": server.url}}}
        with pytest.raises(FlowGrpoError, match="groups scores groups of 4 images at most, and sampling.group_size is 8"):
            Bench(config_of(rewards, **{"sampling.group_size": 8})).__enter__()
        with Bench(config_of(rewards, **{"sampling.group_size": 4, "sampling.micro_batch": 4})) as bench:
            bench.submit(random_images(4))
            assert bench.finish(1)[0].valid.all()


def remote(url, **more):
    return {"type": "remote", "options": {"url": url, "timeout_s": 1.0, "retries": 1, "backoff_s": 0.05}, **more}


def judge(url, **more):
    options = {"base_url": f"{url}/v1", "timeout_s": 1.0, "retries": 1, "backoff_s": 0.05}
    return {"type": "vlm_judge", "options": options, **more}


KINDS = {"remote": (RewardService, remote, lambda image: image[..., 0].mean()),
         "vlm_judge": (ChatService, judge, lambda image: image[..., 0].mean() / 255)}
FAULTS = {"remote": ("500", "503", "hang", "close", "empty", "short", "nan", "unparsable", "words"),
          "vlm_judge": ("500", "hang", "close", "empty", "unparsable", "outside", "nan")}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_of_the_server_masks_its_image_alone_and_is_counted(kind, ray_cluster):
    """Every fault at once, a server and a reward each."""
    service, settings, expected = KINDS[kind]
    images = [random_images(3, 0), random_images(3, 1, victim=1)]
    right = [[expected(image) for image in batch] for batch in images]
    with contextlib.ExitStack() as stack:
        servers = {f"web-{fault}": stack.enter_context(serving(service(fault))) for fault in FAULTS[kind]}
        bench = stack.enter_context(Bench(config_of({name: settings(server.url) for name, server in servers.items()})))
        for number, batch in enumerate(images):
            bench.submit(batch, group=number)
        sound, faulty = bench.finish(2)
        counts = bench.scoring.counts
    assert sound.valid.all() and faulty.valid.tolist() == [True, False, True]
    for name in servers:
        assert np.allclose(sound.scores[name], right[0], rtol=1e-6), name
        assert np.isnan(faulty.scores[name]).tolist() == [False, True, False], f"{name}: no score is no 0"
        assert np.allclose(faulty.scores[name][[0, 2]], [right[1][0], right[1][2]], rtol=1e-6), name
        assert counts[f"failures/{name}"] == 1 and counts[f"retries/{name}"] == 1, name


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_goes_away_stops_the_run(kind, ray_cluster):
    service, settings, _ = KINDS[kind]
    with serving(service()) as server, Bench(config_of({"web": settings(server.url)})) as bench:
        bench.submit(random_images(2))
        assert bench.finish(1)[0].valid.all()
        server.stop()
        bench.submit(random_images(2), group=1)
        with pytest.raises(FlowGrpoError, match="reward web has no score for 2 of 2 images"):
            bench.finish(2)
    assert np.isnan(bench.results[1, 1, 0].scores["web"]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_is_not_there_stops_the_start(kind, ray_cluster):
    service, settings, _ = KINDS[kind]
    with serving(service()) as server:
        pass
    with pytest.raises(FlowGrpoError, match=f"(?s)pool reward.web: actor 0 could not start: .*{server.url}"):
        Bench(config_of({"web": settings(server.url)})).__enter__()


CHECKERBOARD = np.indices((6, 10)).sum(axis=0) % 2 * np.array([255, 128, 1])[:, None, None]
PATTERNS = np.stack([CHECKERBOARD.transpose(1, 2, 0), np.broadcast_to([255, 0, 0], (6, 10, 3))]).astype(np.uint8)


def test_pixels_reach_every_kind_of_reward_as_they_left_the_sampler(ray_cluster):
    """A checkerboard and a pure red image: in place, in range, and red first."""
    seen = {"web": [], "chat": []}

    class Remembers(RewardService):
        def __call__(self, method, path, body):
            seen["web"] += [from_png(text) for text in body["images"]] if body else []
            return super().__call__(method, path, body)

    class RemembersChat(ChatService):
        def __call__(self, method, path, body):
            text = json.dumps(body)
            if body:
                start = text.index("data:image/png;base64,")
                seen["chat"].append(from_png(text[start : text.index('"', start)]))
            return super().__call__(method, path, body)

    with serving(Remembers()) as web, serving(RemembersChat()) as chat:
        rewards = {"function": {"python": "own_rewards:fingerprint"}, "group": {"python": "own_rewards:fingerprint_group"},
                   "web": remote(web.url), "chat": judge(chat.url, self_test=False)}
        with Bench(config_of(rewards)) as bench:
            bench.submit(PATTERNS[:1], shard=0, shards=2)
            bench.submit(PATTERNS[1:], shard=1, shards=2)
            results = bench.finish(2)
    expected = own_rewards.fingerprint(PATTERNS, None, None)
    for name in ("function", "group"):
        assert np.concatenate([r.scores[name] for r in results]).tolist() == expected, name
    for name, images in seen.items():
        found = sorted(image.tobytes() for image in images)
        assert found == sorted(image.tobytes() for image in PATTERNS), name
