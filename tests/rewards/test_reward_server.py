"""The reward server, as its clients see it: in this process for its answers, as a process of its own for its life."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import requests
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from flowgrpo_ray import rewards
from flowgrpo_ray.rewards import Reward, RewardError, SelfTest
from flowgrpo_ray.rewards import server as server_module
from flowgrpo_ray.rewards.http_client import to_base64, to_png
from flowgrpo_ray.rewards.server import RewardServer

IMAGES = np.random.default_rng(1).integers(0, 256, (5, 16, 24, 3), np.uint8)


class Probe(Reward):
    """Scores the mean of red; a prompt may ask for something else. `running` counts calls under way."""

    name = "probe"
    range = (0.0, 255.0)
    running, together, seen = 0, 0, []
    go = threading.Event()

    @classmethod
    def check_prompt(cls, prompt, metadata, **options):
        if prompt == "leave":
            sys.exit(0)
        return "it is bad; an example is: good" if prompt == "bad" else None

    def self_test_case(self):
        images = np.zeros((2, 4, 4, 3), np.uint8)
        images[0, ..., 0] = 255
        return SelfTest(images, ("", ""))

    def score(self, images, prompts, metadata, *, group_ids=None):
        cls = type(self)
        cls.running += 1
        cls.together = max(cls.together, cls.running)
        try:
            cls.seen.append((prompts[0], metadata, group_ids))
            if prompts[0] == "wait":
                cls.go.wait(20)
            if prompts[0] == "raise":
                raise ValueError("the model is gone")
            if prompts[0] == "stop":
                raise StopIteration
            if prompts[0] == "exit":
                sys.exit(3)
            scores = images[..., 0].mean(axis=(1, 2)).astype(np.float32)
            if prompts[0] == "nan":
                scores[-1] = np.nan
            return {"probe": scores[:1] if prompts[0] == "short" else scores, "probe_half": scores / 2}
        finally:
            cls.running -= 1


class GroupProbe(Probe):
    name = "group_probe"
    scope = "group"

    def score(self, images, prompts, metadata, *, group_ids=None):
        return {"group_probe": np.asarray(group_ids, np.float32)}


@contextlib.contextmanager
def served(reward, **settings):
    """The address of a server on a thread."""
    started, loop = threading.Event(), asyncio.new_event_loop()
    runner = web.AppRunner(RewardServer(reward, **settings).app, handler_cancellation=True, shutdown_timeout=1, access_log=None)

    async def start():
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        started.set()

    def work():
        loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())

    thread = threading.Thread(target=work)
    thread.start()
    started.wait(10)
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        Probe.go.set()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture
def probe():
    Probe.running, Probe.together, Probe.seen = 0, 0, []
    Probe.go.clear()
    return Probe()


def body(n=2, prompt="good", **more):
    return {"images": [to_base64(to_png(image)) for image in IMAGES[:n]], "prompts": [prompt] * n, "metadata": [{}] * n,
            "group_ids": None} | more


def ask(url, content, **how):
    return requests.post(f"{url}/v1/score", **({"json": content} if not isinstance(content, bytes) else {"data": content}),
                         timeout=20, **how)


def until(condition):
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it did not happen")


# Answers --------------------------------------------------------------------------------------------------------------

def test_scores_with_monitors(probe):
    with served(probe) as url:
        answer = ask(url, body(3, metadata=[{"a": [1]}, {}, {}], group_ids=[4, 4, 4]))
    expected = IMAGES[:3, ..., 0].mean(axis=(1, 2)).astype(np.float32)
    assert answer.status_code == 200
    assert answer.json() == {"scores": {"probe": expected.tolist(), "probe_half": (expected / 2).tolist()}}
    assert Probe.seen == [("good", [{"a": [1]}, {}, {}], [4, 4, 4])]


PNG, OTHER_SIZE = to_base64(to_png(IMAGES[0])), to_base64(to_png(IMAGES[0, :8]))


@pytest.mark.parametrize(("content", "field", "message"), [
    (b"not json", "body", "is no JSON"),
    (b'{"images": [NaN]}', "body", "NaN is no JSON number"),
    ([1], "body", "is a list, not an object with images, prompts"),
    (body() | {"image": []}, "image", "is no field of a request; did you mean images?"),
    ({"prompts": ["x"]}, "images", "is missing"),
    (body() | {"images": "x"}, "images", "is a text, not a list of base64 PNG texts"),
    (body() | {"images": []}, "images", "is empty"),
    (body(5), "images", "holds 5 images, more than the 4 of --max-batch"),
    (body() | {"images": [PNG, 7]}, "images[1]", "is a number; images holds base64 PNG texts"),
    (body() | {"images": [PNG, "!"]}, "images[1]", "is no base64"),
    (body() | {"images": [PNG, to_base64(b"GIF89a")]}, "images[1]", "is no PNG"),
    (body() | {"images": [PNG, OTHER_SIZE]}, "images[1]", "is of 24 x 8 pixels, and images[0] of 24 x 16"),
    (body() | {"prompts": ["x"]}, "prompts", "holds 1 for 2 images"),
    (body() | {"prompts": ["x", None]}, "prompts[1]", "is null; prompts holds texts"),
    (body() | {"prompts": ["x", "bad"]}, "prompts[1]", "it is bad; an example is: good"),
    (body() | {"metadata": [{}, []]}, "metadata[1]", "is a list; metadata holds objects"),
    (body() | {"metadata": {}}, "metadata", "is an object, not a list"),
    (body() | {"group_ids": [1]}, "group_ids", "holds 1 for 2 images"),
    (body() | {"group_ids": [1, True]}, "group_ids[1]", "is a boolean"),
])
def test_a_bad_request_is_told_which_field_is_wrong(probe, content, field, message):
    with served(probe, max_batch=4) as url:
        answer = ask(url, content)
    assert answer.status_code == 400 and Probe.seen == []
    error = answer.json()["error"]
    assert error["field"] == field and message in error["message"]


def test_a_reward_of_groups_needs_their_ids():
    with served(GroupProbe()) as url:
        answer = ask(url, body())
        assert answer.status_code == 400 and answer.json()["error"]["field"] == "group_ids"
        assert ask(url, body(group_ids=[3, 5])).json() == {"scores": {"group_probe": [3, 5]}}


def test_a_request_that_is_too_large_is_refused(probe):
    with served(probe, max_body_mb=1) as url:
        answer = ask(url, body() | {"prompts": ["x" * 1_200_000, ""]})
        assert answer.status_code == 413 and "1000000" in answer.json()["error"]["message"]
        assert requests.get(f"{url}/nowhere", timeout=5).json()["error"]["message"] == "404: Not Found"


def test_the_pixels_of_a_request_are_bounded(probe, monkeypatch):
    monkeypatch.setattr(server_module, "MAX_PIXELS", 2 * 16 * 24)
    with served(probe) as url:
        assert ask(url, body(2)).status_code == 200
        error = ask(url, body(3)).json()["error"]
    assert error == {"field": "images[2]", "message": "has 24 x 16 pixels, more than the 0 allowed"}


@pytest.mark.parametrize(("prompt", "message"), [
    ("raise", "ValueError: the model is gone"),
    ("nan", r"RewardError: reward probe: 'probe' is nan at \[1\] of 2 images"),
    ("short", r"RewardError: reward probe: 'probe' has shape \[1\]"),
    ("stop", r"the reward raised StopIteration\(\)"),
    ("exit", r"the reward raised SystemExit\(3\)"),
])
def test_a_reward_that_fails_is_an_error_and_the_server_goes_on(probe, prompt, message):
    with served(probe) as url:
        answer = ask(url, body(prompt=prompt))
        assert answer.status_code == 500 and "NaN" not in answer.text
        assert re.search(message, answer.json()["error"]["message"])
        assert ask(url, body()).status_code == 200


def test_exit_in_the_checks_of_a_reward_is_an_answered_error_too(probe, monkeypatch):
    def leave(self):
        sys.exit(0)

    with served(probe) as url:
        answer = ask(url, body(prompt="leave"))
        assert answer.status_code == 500 and "reward probe called sys.exit(0)" in answer.json()["error"]["message"]
        monkeypatch.setattr(Probe, "self_test_case", leave)
        answer = requests.get(f"{url}/v1/self_test", timeout=5)
        assert answer.status_code == 500 and "reward probe called sys.exit(0)" in answer.json()["error"]["message"]
        assert ask(url, body()).status_code == 200
        assert requests.get(f"{url}/health", timeout=5).json()["failures"] == 2


def test_failures_of_one_reason_are_logged_once_and_then_counted(probe, caplog):
    with served(probe) as url, caplog.at_level("WARNING"):
        for _ in range(12):
            ask(url, body(prompt="raise"))
        ask(url, body(prompt="nan"))
    said = [record.message for record in caplog.records if "scoring failed" in record.message]
    assert len(said) == 3 and ["ValueError: the model is gone" in line for line in said] == [True, True, False]
    assert "10 times" in said[1] and "'probe' is nan" in said[2]


def test_health_and_metrics(probe):
    probe.notes += ("no glyphs",)
    with served(probe, max_batch=9) as url:
        ask(url, body(3))
        ask(url, body(2))
        ask(url, body(prompt="raise"))
        ask(url, b"")
        health = requests.get(f"{url}/health", timeout=5).json()
        metrics = requests.get(f"{url}/metrics", timeout=5)
    assert {key: health[key] for key in ("name", "range", "scope", "max_batch", "options", "busy", "queued")} == {
        "name": "probe", "range": [0, 255], "scope": "sample", "max_batch": 9, "options": {}, "busy": False, "queued": 0}
    assert (health["requests"], health["images"], health["failures"]) == (4, 5, 1)
    assert health["notes"] == ["no glyphs"]
    assert health["versions"]["flowgrpo_ray"] == "0.1.0" and health["versions"]["python"] == sys.version.split()[0]
    samples = {(s.name, *s.labels.values()): s.value for family in text_string_to_metric_families(metrics.text)
               for s in family.samples}
    assert samples["flowgrpo_reward_server_requests_total", "200"] == 2
    assert samples["flowgrpo_reward_server_requests_total", "500"] == 1
    assert samples["flowgrpo_reward_server_requests_total", "400"] == 1
    assert samples["flowgrpo_reward_server_images_total",] == 5
    assert samples["flowgrpo_reward_server_failures_total",] == 1
    assert samples["flowgrpo_reward_server_seconds_count",] == 2
    assert metrics.headers["Content-Type"].startswith("text/plain")


def test_an_open_range_is_null():
    with served(rewards.get("jpeg_compressibility")) as url:
        health = requests.get(f"{url}/health", timeout=5).json()
    assert health["range"] == [None, 0] and set(health["versions"]) == {"flowgrpo_ray", "python", "pillow"}


def in_threads(calls):
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    return threads


def test_one_request_is_scored_at_a_time_and_the_others_wait(probe):
    answers = []
    with served(probe) as url:
        threads = in_threads([lambda: answers.append(ask(url, body(prompt="wait")).status_code) for _ in range(4)])
        until(lambda: requests.get(f"{url}/health", timeout=5).json()["queued"] == 3)
        assert requests.get(f"{url}/health", timeout=5).json()["busy"]
        Probe.go.set()
        for thread in threads:
            thread.join()
    assert answers == [200] * 4 and Probe.together == 1


def test_the_known_images_are_asked_for_where_scores_are(probe, monkeypatch):
    case, places = probe.self_test_case(), []

    def slow(self):
        places.append(threading.current_thread().name)
        return (self.score(case.images, ["wait", ""], [{}, {}]), case)[1]

    monkeypatch.setattr(Probe, "self_test_case", slow)
    answers = {}
    with served(probe, max_queue=1) as url:
        threads = in_threads([lambda: answers.update(case=requests.get(f"{url}/v1/self_test", timeout=20).json())])
        until(lambda: Probe.running == 1)
        threads += in_threads([lambda: answers.update(scored=ask(url, body(1)).json())])
        until(lambda: requests.get(f"{url}/health", timeout=5).json()["queued"] == 1)
        full = requests.get(f"{url}/v1/self_test", timeout=5)
        assert full.status_code == 503 and "the queue is full: 1 request waits" in full.json()["error"]["message"]
        Probe.go.set()
        for thread in threads:
            thread.join()
    assert len(answers["case"]["images"]) == 2 and "scores" in answers["scored"]
    assert Probe.together == 1 and places == ["scorer"]


def raise_lost(self):
    raise KeyError("lost")


@pytest.mark.parametrize(("case", "message"), [
    (raise_lost, "KeyError: 'lost'"),
    (lambda self: SelfTest(IMAGES, ("",) * 5, ({"a": object()},) * 5), "TypeError: Object of type object is not JSON"),
    (lambda self: SelfTest(IMAGES / 2, ("",) * 5), "TypeError: Cannot handle this data type"),
])
def test_known_images_that_cannot_be_given_are_an_error_in_json(probe, monkeypatch, case, message):
    monkeypatch.setattr(Probe, "self_test_case", case)
    with served(probe) as url:
        answer = requests.get(f"{url}/v1/self_test", timeout=5)
        assert answer.status_code == 500 and message in answer.json()["error"]["message"]
        assert ask(url, body()).status_code == 200


@pytest.mark.parametrize("function", ["in_place", "unlocks"])
def test_a_served_reward_gets_read_only_images_as_in_a_run(function):
    with served(rewards.get(f"own_rewards:{function}")) as url:
        answer = ask(url, body())
    assert answer.status_code == 500 and re.search("read-only|cannot set WRITEABLE", answer.json()["error"]["message"])


def test_a_full_queue_says_try_again(probe):
    with served(probe, max_queue=1) as url:
        threads = in_threads([lambda: ask(url, body(prompt="wait")) for _ in range(2)])
        until(lambda: requests.get(f"{url}/health", timeout=5).json()["queued"] == 1)
        answer = ask(url, body())
        assert answer.status_code == 503 and answer.headers["Retry-After"] == "1"
        assert "the queue is full: 1 request waits" in answer.json()["error"]["message"]
        Probe.go.set()
        for thread in threads:
            thread.join()
        assert ask(url, body()).status_code == 200


def test_what_nobody_waits_for_any_more_is_not_scored(probe):
    with served(probe) as url:
        (first,) = in_threads([lambda: ask(url, body(prompt="wait"))])
        until(lambda: Probe.running == 1)
        with pytest.raises(requests.exceptions.ReadTimeout):
            requests.post(f"{url}/v1/score", json=body(prompt="late"), timeout=0.3)
        until(lambda: requests.get(f"{url}/health", timeout=5).json()["requests"] == 1)  # its handler has ended
        Probe.go.set()
        first.join()
        assert ask(url, body()).status_code == 200
    assert [prompt for prompt, *_ in Probe.seen] == ["wait", "good"]


def test_remote_passes_the_self_test_over_the_wire(probe):
    with served(probe) as url:
        rewards.get("remote", url=url).self_test()
    assert len(Probe.seen) == 1


# Life -----------------------------------------------------------------------------------------------------------------

SLOW = '''
import time
def slow(images, prompts, metadata):
    print("scoring", flush=True)
    time.sleep({seconds})
    return [0.25] * len(images)
'''


@contextlib.contextmanager
def process(*arguments, cwd=None, code=None):
    """`flowgrpo-ray serve-reward` as a process, and its address."""
    command = [sys.executable, "-c", code] if code else [
        sys.executable, "-m", "flowgrpo_ray.cli", "serve-reward", *arguments, "--port", "0"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    server = subprocess.Popen(command, cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        line = server.stdout.readline()
        found = re.search(r"serving \S+ at (http://127\.0\.0\.1:\d+)", line)
        assert found, (line, server.communicate(timeout=20))
        yield server, found.group(1)
    finally:
        if server.poll() is None:
            server.kill()
        server.communicate(timeout=20)


def end(server, number):
    server.send_signal(number)
    _, err = server.communicate(timeout=30)
    return server.returncode, err.strip().splitlines()[-1]


def test_a_served_reward_scores_bit_for_bit_as_here_and_sigterm_ends_it():
    red, board = np.zeros((2, 16, 24, 3), np.uint8)
    red[..., 0], board[::2, ::2] = 255, (10, 200, 40)
    images = np.concatenate([[red, board], IMAGES])
    prompts, metadata = [""] * len(images), [{}] * len(images)
    local = rewards.get("jpeg_compressibility").score(images, prompts, metadata)["jpeg_compressibility"]
    with process("jpeg_compressibility") as (server, url):
        reward = rewards.get("remote", url=url, batch_size=3, retries=1, backoff_s=0.0)
        reward.self_test()
        assert reward.range == (-np.inf, 0)
        far = reward.score(images, prompts, metadata)
        assert list(far) == ["remote"] and far["remote"].tobytes() == local.tobytes()
        assert end(server, signal.SIGTERM) == (143, "terminated")
        with pytest.raises(RewardError, match=r"refused \(tried 2 times\)"):
            reward.score(images, prompts, metadata)


def test_ctrl_c_ends_it():
    with process("jpeg_compressibility", "--no-self-test") as (server, _):
        assert end(server, signal.SIGINT) == (130, "interrupted")


def test_killed_while_it_scores_is_a_reward_error(tmp_path):
    (tmp_path / "own.py").write_text(SLOW.format(seconds=60))
    with process("own:slow", cwd=tmp_path) as (server, url):
        reward = rewards.get("remote", url=url, retries=2, backoff_s=0.0)
        killer = threading.Thread(target=lambda: (server.stdout.readline(), server.kill()))
        killer.start()
        with pytest.raises(RewardError, match=r"\(tried 3 times\)"):
            reward.score(IMAGES, ["x"] * 5, [{}] * 5)
        killer.join()


def test_sigterm_lets_a_scoring_call_finish(tmp_path):
    (tmp_path / "own.py").write_text(SLOW.format(seconds=1))
    with process("own:slow", cwd=tmp_path) as (server, url):
        answers = []
        (client,) = in_threads([lambda: answers.append(ask(url, body()).json())])
        assert server.stdout.readline() == "scoring\n"
        assert end(server, signal.SIGTERM) == (143, "terminated")
        client.join()
    assert answers == [{"scores": {"slow": [0.25, 0.25]}}]


def test_a_scoring_call_that_hangs_does_not_keep_it_alive(tmp_path):
    (tmp_path / "own.py").write_text(SLOW.format(seconds=600))
    code = ("from flowgrpo_ray.rewards import server\nserver.GRACE_S = 0.2\n"
            "server.serve('own:slow', {}, host='127.0.0.1', port=0, max_batch=8)")
    with process(code=code, cwd=tmp_path) as (server, url):
        (client,) = in_threads([lambda: _quietly(url)])
        assert server.stdout.readline() == "scoring\n"
        server.send_signal(signal.SIGTERM)
        out, _ = server.communicate(timeout=30)
        client.join()
    assert server.returncode == 143 and "slow still scores after 0.2 s" in out


def _quietly(url):
    with contextlib.suppress(requests.RequestException):
        ask(url, body())


@pytest.mark.parametrize(("arguments", "code", "message"), [
    (["jpeg_compresibility"], 2, "did you mean jpeg_compressibility?"),
    (["ocr", "--option", "mode=recognise"], 2, "did you mean recognition?"),
    (["ocr", "--option", "mode"], 2, "not of the form"),
    (["video_ocr"], 2, "reward video_ocr scores videos; this command takes images; did you mean ocr?"),
    (["remote", "--option", "url=http://127.0.0.1:9", "--option", "retries=0"], 1, "http://127.0.0.1:9/health"),
])
def test_what_cannot_be_served_is_said(arguments, code, message):
    command = [sys.executable, "-m", "flowgrpo_ray.cli", "serve-reward", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == code and message in done.stderr and "Traceback" not in done.stderr
