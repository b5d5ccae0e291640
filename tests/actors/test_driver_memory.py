"""The driver moves refs, not tensors: its memory stays flat, and nothing of a finished step is left in the store."""

from __future__ import annotations

import gc
import time

import big_objects
import psutil
import pytest
import ray
from runs import Watcher, run, small_config

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

STEPS = 50
MIB = 1 << 20


class Memory(Watcher):
    """After every step: the driver's resident bytes, and what of its refs and of the object store is in use."""

    def __init__(self):
        super().__init__()
        self.resident: list[int] = []
        self.refs: list[int] = []
        self.stored: list[int] = []
        self.peak = 0

    def activity(self, doing):
        if self.rows and len(self.rows) < 3:
            self.peak = max(self.peak, stored_bytes())

    def row(self, row):
        super().row(row)
        gc.collect()
        self.resident.append(psutil.Process().memory_info().rss)
        self.refs.append(len(ray._private.worker.global_worker.core_worker.get_all_reference_counts()))
        if row["step"] % 10 == 0:
            self.stored.append(settled_bytes(1 if row["step"] == STEPS else 4))


def settled_bytes(target_mib: int) -> int:
    """Bytes left in the store once Ray has freed what nobody refers to, which it does in batches."""
    deadline = time.monotonic() + 30
    while (left := stored_bytes()) >= target_mib * MIB and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def stored_bytes() -> int:
    """Bytes in use in the object store of this node."""
    import ray._private.internal_api as internal

    node = ray.nodes()[0]
    return internal.node_stats(node["NodeManagerAddress"], node["NodeManagerPort"]).store_stats.object_store_bytes_used


@pytest.mark.timeout(600)
def test_fifty_steps_with_large_objects(tmp_path):
    memory = Memory()
    config = small_config(tmp_path, "memory", steps=STEPS, overrides={
        "sampling.num_steps": 2, "sampling.window": {"size": 1, "range": [0, 1]}, "sampling.groups_per_step": 2,
        "train.updates_per_step": 1})
    run(config, memory, rollout_class=big_objects.BigObjects)
    assert memory.peak > 4 * MIB, "the test's objects were not large, or never in the store"
    # The first steps load code and fill caches; from then on nothing may add up.
    early, late = memory.resident[9], max(memory.resident[-5:])
    assert late - early < 16 * MIB, f"the driver grew by {(late - early) / MIB:.1f} MiB over {STEPS - 10} steps"
    # One more now and then is a call to the control actor on its way.
    assert min(memory.refs[-10:]) <= min(memory.refs[:10]), f"references add up: {memory.refs}"
    # What stays is the published adapter and its EMA (small), and two prompts encoded ahead for the next step (3 MiB).
    assert max(memory.stored[:-1]) < 4 * MIB, f"bytes left after steps 10, 20, ...: {memory.stored}"
    assert memory.stored[-1] < MIB, f"{memory.stored[-1]} bytes are left after the last step"
