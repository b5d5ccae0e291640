"""Rows of metrics as TensorBoard events and, optionally, as a Weights & Biases run."""

from __future__ import annotations

import io
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from flowgrpo_ray import storage
from flowgrpo_ray.errors import ConfigError


class TensorBoardLogger:
    """Event files in `tensorboard/` of a run directory.

    An object store cannot append, so events of such a run are spooled in a local folder and uploaded by `flush`, which
    a checkpoint calls. `resume_step` is the step that a resumed run goes on from: TensorBoard then hides what an
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
    """A Weights & Biases run. `run_id` belongs into the checkpoint: given back, a resumed run goes on in its curves.

    Curves are drawn over "step" (their own x axis), so a resumed run may log steps again that were logged after the
    checkpoint. `mode` is wandb's: online, offline, disabled; None = the environment decides.

    Raises:
        ConfigError: wandb is not installed.
    """

    def __init__(
        self, project: str, name: str, config: Mapping[str, Any], run_id: str | None = None, mode: str | None = None,
        directory: str | None = None,
    ):
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("logging.wandb_project is set, but wandb cannot be imported "
                              f"({error}); run `pip install 'flowgrpo-ray[wandb]'` or leave it out") from None
        self._wandb = wandb
        self._run = wandb.init(project=project, name=name, config=dict(config), id=run_id, mode=mode, dir=directory,
                               resume="allow" if run_id else None)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    @property
    def run_id(self) -> str:
        return self._run.id

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
