"""A reward whose backend goes away while the run is at work: its actor dies, and cannot start until the backend is back."""

from __future__ import annotations

import os
import signal

import numpy as np
import own_rewards

from flowgrpo_ray.rewards import Reward, RewardError
from flowgrpo_ray.rewards.base import Option


class Backed(Reward):
    name = "backed"
    range = (0.0, 1.0)
    options = {"folder": Option("", "Where the file `gone` says that the backend is away", kind=str)}

    def __init__(self, **options):
        super().__init__(**options)
        self.gone = os.path.join(self.settings["folder"], "gone")

    def self_test(self):
        if os.path.exists(self.gone):
            raise RewardError("the backend does not answer")

    def score(self, images, prompts, metadata, *, group_ids=None):
        """Brightness. At the first marked image the backend goes away, and this process with it."""
        if not os.path.exists(self.gone) and (images[:, 0, 0] == own_rewards.VICTIM).all(axis=1).any():
            open(self.gone, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"backed": own_rewards.brightness(images, prompts, metadata).astype(np.float32)}
