"""Trackers: found wanting before anything starts, and harmless to the run afterwards."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path

import psutil
import pytest
import yaml
from command import start, write_config
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flowgrpo_ray import storage, waiting
from flowgrpo_ray.config.schema import LoggingConfig
from flowgrpo_ray.errors import ConfigError
from flowgrpo_ray.run_dir import trackers
from flowgrpo_ray.run_dir.checkpoint import latest
from flowgrpo_ray.run_dir.metrics import read_metrics

pytest_plugins = ["s3_server"]


def rows(*steps):
    return [{"step": step, "kl": step / 3} for step in steps]


def png(color: str) -> bytes:
    sink = io.BytesIO()
    Image.new("RGB", (8, 8), color).save(sink, "PNG")
    return sink.getvalue()


def test_a_missing_tracker_is_reported_together_with_other_mistakes(tmp_path, monkeypatch):
    import importlib.util

    from runs import Watcher, small_config

    from actors.run import train

    config = small_config(tmp_path, "x", overrides={"data.train_prompts": "/no/such/prompts.txt"})
    config.logging.tensorboard = True
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        train(config, Watcher())
    assert [line.split(":")[0].split(" ")[0] for line in str(caught.value).splitlines()] == [
        "data.train_prompts", "logging.tensorboard"]


def test_tensorboard_goes_on_after_a_resume(run_dir, tmp_path):
    def files() -> list[str]:
        return storage.list_dir(storage.join(run_dir, "tensorboard"))

    board = trackers.TensorBoardLogger(run_dir)
    for row in rows(0, 1, 2, 3):
        board.log(row)
    board.log_image("samples/policy", png("red"), 0)
    board.flush()
    spool = board._spool
    assert len(files()) == 1
    board.close()
    assert spool is None or not spool.exists()
    board = trackers.TensorBoardLogger(run_dir, resume_step=1)
    for row in rows(2, 3, 4):
        board.log(row | {"kl": row["kl"] + 1})
    board.close()
    local = tmp_path / "events"
    local.mkdir()
    for name in files():
        data = storage.read_bytes(storage.join(run_dir, "tensorboard", name))
        (local / name).write_bytes(data)
    assert len(list(local.iterdir())) == 2
    accumulator = EventAccumulator(str(local), size_guidance={"scalars": 0}).Reload()
    events = accumulator.Scalars("kl")
    assert [event.step for event in events] == [0, 1, 2, 3, 4]
    assert [event.value for event in events] == pytest.approx([0, 1 / 3, 2 / 3 + 1, 2, 4 / 3 + 1])
    assert accumulator.Tags()["images"] == ["samples/policy"]


# Before anything starts -----------------------------------------------------------------------------

W_AND_B = LoggingConfig(tensorboard=False, wandb_project="project")


def test_a_tracker_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"wandb_project is set.*pip install 'flowgrpo-ray\[wandb\]'"):
        trackers.check(W_AND_B)
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install tensorboard.*logging.tensorboard=false"):
        trackers.check(LoggingConfig())
    trackers.check(LoggingConfig(tensorboard=False))


def test_a_folder_named_wandb_is_not_taken_for_the_package(tmp_path, monkeypatch):
    (tmp_path / "wandb" / "run-1").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ConfigError, match=rf"not installed.* the folder {tmp_path}/wandb"):
        trackers.check(W_AND_B)
    sys.modules.pop("wandb", None)


def fake_wandb(monkeypatch, **settings):
    known = {"_offline": False, "_noop": False, "api_key": None, "base_url": "https://api.wandb.ai"}
    setup = types.SimpleNamespace(settings=types.SimpleNamespace(**{**known, **settings}))
    module = types.ModuleType("wandb")
    module.init = None
    module.sdk = types.SimpleNamespace(
        wandb_setup=types.SimpleNamespace(singleton=lambda: setup))
    monkeypatch.setitem(sys.modules, "wandb", module)


def test_w_and_b_needs_a_key_or_a_mode_without(tmp_path, monkeypatch):
    keys = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(keys))
    fake_wandb(monkeypatch)
    with pytest.raises(ConfigError, match="no API key; run `wandb login`.*WANDB_MODE=offline"):
        trackers.check(W_AND_B)
    keys.write_text("machine elsewhere.org login user password secret\n")
    with pytest.raises(ConfigError, match="no API key"):
        trackers.check(W_AND_B)
    keys.write_text("machine api.wandb.ai login user password secret\n")
    trackers.check(W_AND_B)
    keys.unlink()
    for right in ({"api_key": "k"}, {"_offline": True}, {"_noop": True},
                  {"identity_token_file": "token"}):
        fake_wandb(monkeypatch, **right)
        trackers.check(W_AND_B)


@pytest.mark.parametrize(("environment", "right"), [
    ({}, False), ({"WANDB_MODE": "offline"}, True), ({"WANDB_API_KEY": "a" * 40}, True)])
def test_the_check_reads_the_settings_of_the_real_package(tmp_path, environment, right):
    pytest.importorskip("wandb")
    script = """
from flowgrpo_ray.run_dir import trackers
from flowgrpo_ray.config.schema import LoggingConfig
import psutil
try:
    trackers.check(LoggingConfig(wandb_project="p"))
    print("right")
except trackers.ConfigError as error:
    print(error)
print(len(psutil.Process().children()))
"""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    out = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path,
        env={**inherited, "HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path),
             **environment}).stdout.splitlines()
    assert (out[0] == "right") == right and ("no API key" in out[0]) != right
    assert out[1] == "0", "no service was started"


# While it runs --------------------------------------------------------------------------------------

class Fake:
    """Keeps what it is given; fails, or hangs, in one method."""

    def __init__(self, fails_in: str | None = None, hangs_until: threading.Event | None = None):
        self.got, self._fails_in, self._hangs_until = [], fails_in, hangs_until
        self._done("start")

    def _done(self, what, *args):
        if what == self._fails_in:
            if self._hangs_until is None:
                raise ConnectionResetError("Connection lost")
            self._hangs_until.wait()
        self.got.append((what, *args))

    def log(self, row):
        self._done("log", row["step"])

    def log_image(self, key, png, step):
        self._done("log_image", key, step)

    def flush(self):
        self._done("flush")

    def close(self):
        self._done("close")


WHOLE = [("start",), ("log", 1), ("log_image", "samples/ema", 1), ("flush",), ("log", 2), ("close",)]


def run_with(all_of: trackers.Trackers) -> None:
    all_of.log({"step": 1})
    all_of.log_image("samples/ema", b"", 1)
    all_of.flush()
    all_of.log({"step": 2})
    all_of.close()


@pytest.fixture(autouse=True)
def trust(monkeypatch):
    monkeypatch.setattr(waiting, "_abandoned", [])


@pytest.mark.parametrize("method", ["start", "log", "log_image", "flush", "close"])
def test_a_failing_tracker_is_dropped_and_the_others_go_on(method, caplog):
    good, all_of = Fake(), trackers.Trackers(timeout_s=60)
    all_of.start("bad", lambda: Fake(method))
    all_of.start("good", lambda: good)
    run_with(all_of)
    assert good.got == WHOLE
    assert all_of.dropped == ["bad"] and bool(all_of)
    (record,) = [record for record in caplog.records if record.name == trackers.log.name]
    assert record.levelno == logging.WARNING
    assert record.message.startswith(
        "bad (a tracker) failed and is dropped: ConnectionResetError: Connection lost. The metrics of")
    assert waiting.abandoned() == ["bad"], "the command ends without its exit handlers"


@pytest.mark.parametrize("method", ["start", "log", "close"])
def test_a_tracker_that_hangs_holds_nothing(method, caplog):
    over, good, all_of = threading.Event(), Fake(), trackers.Trackers(timeout_s=0.3)
    all_of.start("bad", lambda: Fake(method, over))
    all_of.start("good", lambda: good)
    run_with(all_of)
    over.set()
    assert good.got == WHOLE and all_of.dropped == ["bad"]
    assert "no answer from bad and good within 0.3 s (logging.tracker_timeout_s)" in caplog.text


def test_w_and_b_offline_keeps_its_id(tmp_path):
    pytest.importorskip("wandb")
    script = f"""
from flowgrpo_ray.run_dir.trackers import WandbLogger
for step in (1, 2):
    logger = WandbLogger("project", "run", {{"a": 1}}, "abc123", "offline", {str(tmp_path)!r})
    logger.log({{"step": step, "kl": 0.5}})
    logger.log_image("samples/policy", {png("red")!r}, step)
    logger.close()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0 and not done.stdout, done.stderr
    logs = list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(logs) == 2 and all("abc123" in log.name for log in logs)


@pytest.mark.slow
def test_training_goes_on_when_the_process_of_w_and_b_dies(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = write_config(tmp_path, logging={"wandb_project": "project"})
    process = start(tmp_path, "train", config, "run.steps=8")
    for line in process.stdout:
        if " step 2/8 " in line:
            break
    services = [child for child in psutil.Process(process.pid).children(recursive=True)
                if "wandb" in " ".join(child.cmdline()[:1])]
    assert services
    for service in services:
        with contextlib.suppress(psutil.NoSuchProcess):
            service.send_signal(signal.SIGKILL)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert "W&B (a tracker) failed and is dropped" in err and "Traceback" not in err
    run_dir = str(tmp_path / "runs/small")
    found = read_metrics(run_dir)
    assert [row["step"] for row in found] == list(range(9))
    assert (found[1]["trackers_dropped"], found[-1]["trackers_dropped"]) == (0, 1)
    assert latest(run_dir).state["wandb_run_id"]
    assert list(Path(run_dir).glob("wandb/offline-run-*")), "its files lie in the run's own folder"
    assert yaml.safe_load(Path(run_dir, "config.yaml").read_text())["logging"]["tensorboard"]
    assert list(Path(run_dir, "tensorboard").iterdir())
