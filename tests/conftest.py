"""Fixtures of the whole suite. Ray is started once per module that asks for it, in a temporary directory of its own."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings

# Before torch or ray is imported anywhere: one thread (two on a shared core are many times slower), no cluster of others.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ.pop("RAY_ADDRESS", None)
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

warnings.filterwarnings("ignore", message="The value of the smallest subnormal")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """The same process settings as an actor's: bits depend on them."""
    from flowgrpo_ray.device import configure_process

    configure_process(on_gpu=False, cpu_threads=1)


@pytest.fixture(scope="module")
def ieee_floats():
    """Subnormal floats as the standard has them, for tests that draw any float; an actor's process flushes them to 0."""
    import torch

    torch.set_flush_denormal(False)
    yield
    torch.set_flush_denormal(True)


@pytest.fixture(scope="module")
def ray_cluster():
    """A warm local Ray. The temporary directory is short: Ray puts sockets into it."""
    import ray

    folder = tempfile.mkdtemp(prefix="fgr", dir="/tmp")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [os.path.join(os.path.dirname(os.path.abspath(__file__)), "support"), *filter(None, [os.environ.get("PYTHONPATH")])])
    ray.init(num_cpus=16, include_dashboard=False, _temp_dir=folder, log_to_driver=False, namespace=os.path.basename(folder))
    yield ray
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
