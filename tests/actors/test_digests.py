"""The adapters of the shipped configurations after three steps: a change that should change no result leaves them as they are.

Bits depend on the processor and on the versions of the numeric packages, so each machine has digests of its own. Where there
are none, the tests are skipped and print what to add. After a change that is meant to change results, replace them.
"""

from __future__ import annotations

import platform
import re
from pathlib import Path

import diffusers
import pytest
import torch
from runs import run

from flowgrpo_ray.config import load
from flowgrpo_ray.policies import lora

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
DIGESTS: dict[tuple[str, str, str], dict[str, str]] = {
    ("6 167 Intel(R) Xeon(R) Processor 1 AVX512", "2.13.0+cpu", "0.42.1"): {
        "tiny_ocr": "9f2904ddefd8c091fd210d1a1b809769acf7b0ca312e6236b328f40f12023ffa",
        "tiny_three_rewards": "e5fd1ca4138bf92d35af0bfe47be8ca2f72e44a926e7a37692023e4a8c61bf18",
    },
}


def machine() -> tuple[str, str, str]:
    """What bits depend on beside the code."""
    processor = platform.processor()
    if platform.system() == "Linux":
        cpuinfo = Path("/proc/cpuinfo").read_text()
        processor = " ".join(re.findall(r"^(?:model name|cpu family|model|stepping)\s*: (.*)$", cpuinfo, re.M)[:4])
    return f"{processor} {torch.backends.cpu.get_cpu_capability()}", torch.__version__, diffusers.__version__


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny_ocr", "tiny_three_rewards"])
def test_three_steps_give_the_adapter_of_before(ray_cluster, tmp_path, monkeypatch, name):
    monkeypatch.chdir(CONFIGS.parent)
    config = load(CONFIGS / f"{name}.yaml", {"run.dir": str(tmp_path), "run.steps": 3, "eval.at_start": False,
                                             "eval.every_steps": 0, "eval.at_end": False})
    digest = lora.digest(run(config).adapter)
    if machine() not in DIGESTS:
        pytest.skip(f"no digests of this machine; to add: {machine()}: {name}: {digest}")
    assert digest == DIGESTS[machine()][name]
