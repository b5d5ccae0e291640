"""Connect to Ray, or start it on this machine, and run a configuration."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import ray
from ray.job_config import JobConfig

from actors import head
from actors.controller import Controller, Observer
from actors.evaluator import Evaluator, evaluation_config
from actors.placement import asked, crowding, shared_env
from actors.ray_errors import cannot_connect, cannot_start
from actors.ray_metrics import RayMetrics
from actors.tracebacks import kept
from flowgrpo_ray import startup, storage, waiting
from flowgrpo_ray.config import Config
from flowgrpo_ray.data.plan import padding_note
from flowgrpo_ray.data.trajectory import Arrays
from flowgrpo_ray.errors import Problems, counted
from flowgrpo_ray.preflight import check
from flowgrpo_ray.run_dir import trackers
from flowgrpo_ray.run_dir.inputs import identify, pin_model
from flowgrpo_ray.run_dir.metrics import Row
from flowgrpo_ray.run_dir.recorder import Recorder
from flowgrpo_ray.views.exporter import served

if TYPE_CHECKING:
    from flowgrpo_ray.policies.lora import LoraSettings

log = logging.getLogger(__name__)


@contextmanager
def connected(config: Config, address: str | None = None, **metadata: str) -> Iterator[None]:
    """A Ray connection for the run: `address`, else RAY_ADDRESS (set inside `ray job submit`), else Ray on this machine.

    A connection that is there already is used as it is. A Ray that was started here ends here; it declares as many CPUs
    as the configuration asks for, so that a laptop of two cores can run five light actors. Ray's list of jobs shows the
    metadata of this driver; of a submitted job it shows those that the job was submitted with.
    """
    if ray.is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS")
    # The environment is the image (or this virtual environment): no tool may rebuild it on every worker.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    common = {"log_to_driver": config.logging.level == "debug", "logging_level": logging.WARNING,
              "job_config": JobConfig(metadata={"run": config.run.name, **metadata})}
    on_terminate = signal.getsignal(signal.SIGTERM)
    if address:
        try:
            head.connect(address, config.pools.connect_timeout_s, **common)
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise cannot_connect(error, address) from error
    else:
        need = asked(config)
        if crowded := crowding(config, len(os.sched_getaffinity(0))):
            log.warning("%s", crowded)
        # Ray would make a reward's environment three times before it says why pip fails (pip retries the network itself).
        os.environ.setdefault("RUNTIME_ENV_RETRY_TIMES", "1")
        # "local": a head that runs here already, or the trace of a dead one, is somebody else's.
        common |= {"num_cpus": max(1, math.ceil(need["CPU"])), "include_dashboard": config.logging.dashboard}
        try:
            dashboard = head.start(shared_env(config), **common)
        except Exception as error:  # Ray raises bare ones
            raise cannot_start(error) from error
        if dashboard:
            log.info("Ray's dashboard: %s", dashboard)
    if callable(on_terminate) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_terminate)  # Ray has put its crash handler in place of the caller's
    startup.reached("Ray")
    try:
        yield
    finally:
        head.shut_down()


def train(
    config: Config, observer: Observer, address: str | None = None, controller_class: type[Controller] = Controller
) -> str:
    """Check everything, run the training, return the URI of the run directory.

    Raises:
        FlowGrpoError: with all that a user needs to act on.
    """
    waiting.set_limits(config)
    startup.reached("imports")
    problems = Problems()
    with problems.collected():
        inputs = check(config)
    with problems.collected():
        trackers.check(config.logging)
    problems.raise_found()
    pin_model(config)
    startup.reached("checks")
    if note := padding_note(config):
        observer.say(note)
    recorder = Recorder(config, identify(config))
    try:
        if recorder.start_step >= config.run.steps:
            observer.say(f"this run is done: {counted(config.run.steps, 'step')}; raise run.steps to train on")
            return recorder.run_dir
        if recorder.resume_from:
            observer.resumes(recorder.start_step)
        for note in recorder.notes:
            observer.say(note)
        where = storage.display(recorder.run_dir)
        with kept(recorder.traceback), served(config.logging.prometheus_port) as sinks, \
                connected(config, address, run_dir=where), \
                controller_class(config, inputs, recorder, observer, [RayMetrics(), *sinks]) as controller:
            controller.run()
    finally:
        recorder.close()
    return recorder.run_dir


def evaluate(
    config: Config, adapter: tuple[Arrays, LoraSettings] | None, observer: Observer, address: str | None = None
) -> tuple[Row, bytes | None]:
    """Evaluate an adapter (None: the base model) as training evaluates it; nothing is written.

    Returns:
        a row with the keys of an evaluation (`eval/policy/<reward>` and so on), and a grid of images as PNG (None with
        `eval.grid_images` 0).

    Raises:
        FlowGrpoError: with all that a user needs to act on.
    """
    arrays, settings = adapter if adapter is not None else (None, None)
    config = evaluation_config(config, settings)
    waiting.set_limits(config)
    inputs = check(config)
    with kept(), connected(config, address), Evaluator(config, inputs, observer, arrays) as evaluator:
        row = evaluator.result()
    return row, evaluator.results.grid_png
