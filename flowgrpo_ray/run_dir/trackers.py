"""Rows of metrics as TensorBoard events and, optionally, as a Weights & Biases run.

Trackers are optional, so none may end or hold a run: `check` finds what can be found before any
actor starts, and afterwards each tracker works in a thread of its own (`Trackers`). One that fails is
named, dropped and counted. The run directory's own metrics do not depend on them.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import netrc
import os
import queue
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

from flowgrpo_ray import storage, waiting
from flowgrpo_ray.config.schema import LoggingConfig
from flowgrpo_ray.errors import ConfigError, DeadlineError, described

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """What `Trackers` calls, always from one thread."""

    def log(self, row: Mapping[str, float]) -> None: ...

    def log_image(self, key: str, png: bytes, step: int) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


# Before any actor starts --------------------------------------------------------------------------

def check(config: LoggingConfig) -> None:
    """Check that the trackers of a configuration can start; starts none and asks no server.

    Raises:
        ConfigError: a package is missing or shadowed, or W&B has neither an API key nor a mode that
            needs none.
    """
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError("logging.tensorboard is true, and tensorboard is not installed; run "
                          "`pip install tensorboard`, or set logging.tensorboard=false")
    if config.wandb_project and (problem := _wandb_problem()):
        raise ConfigError(f"logging.wandb_project is set, {problem}; or leave it out")


def _wandb_problem() -> str | None:
    """What keeps W&B from starting, and a remedy."""
    install = "run `pip install 'flowgrpo-ray[wandb]'`"
    try:
        import wandb
    except ImportError as error:
        return f"but wandb cannot be imported ({error}); {install}"
    if not hasattr(wandb, "init"):  # a folder without __init__.py, which W&B leaves where it ran
        folder = next(iter(getattr(wandb, "__path__", [])), "?")
        return (f"but wandb is not installed: what Python finds under that name is the folder "
                f"{folder}, perhaps left by an earlier run; {install}, and remove or rename the "
                "folder if it still stands in the way")
    settings = wandb.sdk.wandb_setup.singleton().settings  # starts nothing
    if settings._offline or settings._noop or settings.api_key:
        return None
    if getattr(settings, "identity_token_file", None) or _in_netrc(settings.base_url):
        return None
    return ("but W&B has no API key; run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline "
            "to write its files here and upload them later with `wandb sync`")


def _in_netrc(url: str) -> bool:
    """Whether the user's .netrc has a password for the host of a URL."""
    names = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for name in names:
        with suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(os.path.expanduser(name)).authenticators(urlsplit(url).hostname or ""):
                return True
    return False


# While it runs ------------------------------------------------------------------------------------

class Trackers:
    """The trackers of a run. No method but `close` waits for one; none raises what a tracker raises.

    Attributes:
        dropped: names of those that failed, in the order in which they did.
    """

    def __init__(self, timeout_s: float) -> None:
        self.dropped: list[str] = []
        self._timeout_s = timeout_s
        self._workers: list[_Worker] = []

    def start(self, name: str, make: Callable[[], Tracker]) -> None:
        """Add a tracker; `make` starts it, in its thread."""
        self._workers.append(_Worker(name, make, self._drop))

    def log(self, row: Mapping[str, float]) -> None:
        """Log a row, "step" included."""
        row = dict(row)
        self._give(lambda tracker: tracker.log(row))

    def log_image(self, key: str, png: bytes, step: int) -> None:
        """Log an image at a step."""
        self._give(lambda tracker: tracker.log_image(key, png, step))

    def flush(self) -> None:
        """Have them write out what they hold."""
        self._give(lambda tracker: tracker.flush())

    def close(self) -> None:
        """End all trackers; waits for them for `timeout_s` at most."""
        workers = [worker for worker in self._workers if worker.name not in self.dropped]
        for worker in workers:
            worker.give(None)

        def join() -> None:
            for worker in workers:
                worker.thread.join()

        try:
            waiting.bounded(join, " and ".join(worker.name for worker in workers), self._timeout_s,
                            setting="logging.tracker_timeout_s")
        except DeadlineError as error:
            for worker in workers:
                if worker.thread.is_alive():
                    self._drop(worker.name, error)

    def __bool__(self) -> bool:
        return len(self._workers) > len(self.dropped)

    def _give(self, call: Callable[[Tracker], None]) -> None:
        for worker in self._workers:
            if worker.name not in self.dropped:
                worker.give(call)

    def _drop(self, name: str, error: BaseException) -> None:
        if name not in self.dropped:
            waiting.distrust(name)
            log.warning("%s (a tracker) failed and is dropped: %s. The metrics of the run "
                        "directory do not depend on it", name, described(error))
            self.dropped.append(name)  # last: `close` does not wait for a thread that is dropped


class _Worker:
    """A tracker in its thread; `give(None)` ends it."""

    def __init__(
        self, name: str, make: Callable[[], Tracker],
        on_failure: Callable[[str, BaseException], None],
    ) -> None:
        self.name, self._make, self._on_failure = name, make, on_failure
        self._calls: queue.SimpleQueue[Callable[[Tracker], None] | None] = queue.SimpleQueue()
        self.give = self._calls.put
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        try:
            tracker = self._make()
            while (call := self._calls.get()) is not None:
                call(tracker)
            tracker.close()
        except BaseException as error:  # some libraries raise what is meant for the main thread
            self._on_failure(self.name, error)


# The trackers -------------------------------------------------------------------------------------

class TensorBoardLogger:
    """Event files in `tensorboard/` of a run directory.

    An object store cannot append, so events of such a run are spooled in a local folder and uploaded by `flush`, which
    a checkpoint calls. `resume_step` is the step that a resumed run starts from: TensorBoard then hides what an
    earlier life of the run logged beyond it.
    """

    def __init__(self, run_dir: str, resume_step: int | None = None):
        from torch.utils.tensorboard import SummaryWriter  # takes a second: only runs that log pay for it

        self._target = storage.join(run_dir, "tensorboard")
        local = storage.local_path(self._target)
        self._spool = None if local else Path(tempfile.mkdtemp(prefix="flowgrpo-tensorboard-"))
        self._uploaded: dict[str, int] = {}
        purge = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(local or self._spool), purge_step=purge)

    def log(self, row: Mapping[str, float]) -> None:
        """Add every key of a row at its step."""
        for key, value in row.items():
            if key != "step":
                self._writer.add_scalar(key, value, int(row["step"]))

    def log_image(self, key: str, png: bytes, step: int) -> None:
        """Add an image, for example a sample grid."""
        pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
        self._writer.add_image(key, pixels, step, dataformats="HWC")

    def flush(self) -> None:
        """Write the events out; upload the event files that grew."""
        self._writer.flush()
        self._upload()

    def close(self) -> None:
        """Flush for the last time and remove the spool."""
        self._writer.close()
        self._upload()
        if self._spool is not None:
            shutil.rmtree(self._spool)

    def _upload(self) -> None:
        if self._spool is None:
            return
        for file in sorted(self._spool.iterdir()):
            data = file.read_bytes()
            if self._uploaded.get(file.name) != len(data):
                storage.write_bytes(storage.join(self._target, file.name), data)
                self._uploaded[file.name] = len(data)


class WandbLogger:
    """A Weights & Biases run. `run_id` belongs into the checkpoint: given back, a resumed run goes on
    in its curves.

    Curves are drawn over "step" (their own x axis), so a resumed run may log steps again that were
    logged after the checkpoint. `mode` is wandb's (online, offline, disabled); None = the environment
    decides. `directory` is where its files go; None = the folder that the command runs in.
    """

    def __init__(
        self, project: str, name: str, config: Mapping[str, Any], run_id: str,
        mode: Literal["online", "offline", "disabled"] | None = None, directory: str | None = None,
    ):
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=project, name=name, config=dict(config), id=run_id, mode=mode, dir=directory,
            resume="allow", settings=wandb.Settings(silent=True, console="off"))
        if self._run.url:
            log.info("W&B run: %s", self._run.url)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, row: Mapping[str, float]) -> None:
        """Log a row, "step" included."""
        self._run.log(dict(row))

    def log_image(self, key: str, png: bytes, step: int) -> None:
        """Log an image at a step."""
        self._run.log({"step": step, key: self._wandb.Image(Image.open(io.BytesIO(png)))})

    def flush(self) -> None:
        """Nothing to do: wandb sends by itself."""

    def close(self) -> None:
        """End the run."""
        self._run.finish()
