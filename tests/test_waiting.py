"""Calls that leave the process: a deadline, a word, and an end at once when a signal comes."""

from __future__ import annotations

import json
import logging
import signal
import threading

import pytest
from command import start, write_config
from silent_server import SilentServer

from flowgrpo_ray import signals, storage, waiting
from flowgrpo_ray.errors import DeadlineError


@pytest.fixture
def hanging():
    """A call that has no answer until the test is over."""
    over = threading.Event()
    yield over.wait
    over.set()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(waiting, "_POLL_S", 0.01)
    monkeypatch.setattr(waiting, "SAY_AFTER_S", 0.05)
    monkeypatch.setattr(waiting, "SAY_EVERY_S", 0.05)


def test_a_call_gives_what_it_gives():
    assert waiting.bounded(lambda: 7, "seven", 60, setting="x.y") == 7
    with pytest.raises(KeyError, match="mine"):
        waiting.bounded(lambda: {}["mine"], "a key", 60, setting="x.y")


def test_a_call_without_an_answer_is_announced_and_left(hanging, quick, caplog):
    with pytest.raises(DeadlineError, match=r"no answer from the well within 0.3 s \(x\.y\)"):
        waiting.bounded(hanging, "the well", 0.3, setting="x.y")
    assert len(caplog.records) > 1 and caplog.records[0].levelno == logging.WARNING
    assert caplog.messages[0].startswith("waiting for the well, since 0 s, for up to 0.3 s (x.y)")
    assert "the well" in waiting.abandoned()


def test_the_deadline_counts_from_the_last_progress(quick):
    progress, ticks = waiting.Progress(), iter(range(8))

    def call() -> str:
        for _ in ticks:
            threading.Event().wait(0.1)
            progress.made()
        return "done"

    assert waiting.bounded(call, "a long file", 0.5, setting="x.y", progress=progress) == "done"


def test_after_a_signal_nothing_is_waited_for_long(hanging, quick, monkeypatch):
    monkeypatch.setattr(waiting, "LEAVING_S", 0.1)
    monkeypatch.setattr(signals, "_received", signal.SIGTERM)
    assert waiting.bounded(lambda: 7, "what answers", 60, setting="x.y") == 7
    with pytest.raises(DeadlineError, match="within 0.1 s"):
        waiting.bounded(hanging, "a store", 3600, setting="x.y")
    with pytest.raises(DeadlineError, match="no answer from a store as yet"):
        waiting.bounded(lambda: 7, "a store", 3600, setting="x.y")


def test_a_signal_that_a_library_swallows_ends_the_wait(hanging, quick, monkeypatch):
    threading.Timer(0.1, lambda: monkeypatch.setattr(signals, "_received", signal.SIGTERM)).start()
    with pytest.raises(signals.Terminated):
        waiting.bounded(hanging, "a store", 3600, setting="x.y")


@pytest.fixture
def silent():
    server = SilentServer()
    yield server
    server.close()


def test_every_call_to_a_silent_store_has_a_deadline(silent, monkeypatch):
    monkeypatch.setattr(waiting.limits, "storage", 0.2)
    for key, value in {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}.items():
        monkeypatch.setenv(key, value)
    uri = f"s3://bucket/runs?endpoint_override=127.0.0.1:{silent.port}&scheme=http&region=us-east-1"
    calls = [storage.size, storage.list_dir, storage.read_bytes, storage.sha256, storage.delete_file, storage.delete_dir,
             lambda uri: storage.write_bytes(uri, b"x")]
    for call in calls:
        with pytest.raises(DeadlineError, match=rf"s3://bucket at 127.0.0.1:{silent.port} within 0.2 s \(run.storage_time"):
            call(uri)


def test_a_command_that_waits_for_a_library_ends_at_once(tmp_path, monkeypatch):
    """A signal, or the deadline, while a store or a Ray cluster takes the connection and never answers: these libraries try for
    minutes, and hold the main thread meanwhile."""
    for key, value in {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(key, value)
    commands = {}
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    for name in ("store", "ray", "late", "hub"):
        server, folder = SilentServer(), tmp_path / name
        folder.mkdir()
        options = {
            "store": [f"run.dir={json.dumps(f's3://bucket/runs?endpoint_override=127.0.0.1:{server.port}&scheme=http')}",
                      "run.storage_timeout_s=3600"],
            "ray": ["--address", f"127.0.0.1:{server.port}", "pools.connect_timeout_s=3600"],
            "late": ["--address", f"127.0.0.1:{server.port}", "pools.connect_timeout_s=2"],
            "hub": ["model.path=owner/model", "run.hub_timeout_s=2"]}[name]
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.port}")
        commands[name] = server, start(folder, "train", write_config(folder), *options)
    for name, number in (("store", signal.SIGTERM), ("ray", signal.SIGINT)):
        server, process = commands[name]
        assert server.connected.wait(120)
        process.send_signal(number)
    for name, (server, process) in commands.items():
        _, err = process.communicate(timeout=60)  # these libraries would go on for longer
        assert process.returncode == {"store": 143, "ray": 130, "late": 1, "hub": 2}[name], (name, err)
        assert "Traceback" not in err
        if name == "late":
            assert f"no answer from Ray at 127.0.0.1:{server.port} within 2 s (pools.connect_timeout_s)" in err
        if name == "hub":
            assert "no answer from model_index.json of owner/model from the Hugging Face Hub within 2 s" in err
        server.close()
    assert not (tmp_path / "ray/runs").exists() or not list((tmp_path / "ray/runs").iterdir()), "the claim was given back"
