"""A rollout actor whose images and conditioning are blown up to more than 1 MiB, for the test of the driver's memory."""

from __future__ import annotations

import numpy as np

from actors.rollout import RolloutActor


class BigObjects(RolloutActor):
    """Real samples, enlarged on the wire: images 16 times along each side, the conditioning with 1.5 MiB of ballast."""

    def encode(self, records):
        meta, *conditionings = super().encode(records)
        return meta, *({**part, "ballast": np.ones((1, 3 << 17), np.float32)} for part in conditionings)

    def sample(self, request, negative, *conditionings):
        plain = [{key: value for key, value in part.items() if key != "ballast"} for part in conditionings]
        meta, images, trajectory = super().sample(request, negative, *plain)
        return meta, images.repeat(16, axis=1).repeat(16, axis=2), trajectory
