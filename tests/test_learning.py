"""The demo learns, and two controls say that it is the reward's doing. Minutes each, on real actors with real OCR."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import run

from flowgrpo_ray.config import load

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500), pytest.mark.usefixtures("ray_cluster")]

DEMO = Path(__file__).resolve().parent.parent / "configs" / "tiny_ocr.yaml"
STEPS = 20


def held_out(folder: Path, name: str, steps: int, at_start: bool = False, **overrides) -> list[float]:
    """Raw-weights reward on held-out words at the evaluations of a run of the demo's configuration."""
    config = load(DEMO, {"run.dir": str(folder), "run.name": name, "run.steps": steps, "eval.every_steps": 0,
                         "eval.at_start": at_start, "checkpoint.every_steps": 0, "train.ema.enabled": False, **overrides})
    rows = run(config).rows
    return [row["eval/policy/ocr"] for row in rows if "eval/policy/ocr" in row]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("learning")


@pytest.fixture(scope="module")
def true_run(ray_cluster, folder):
    return held_out(folder, "true", STEPS, at_start=True)


def test_the_demo_learns_on_held_out_words(true_run):
    before, after = true_run
    assert before <= 0.50
    assert after >= 0.80, f"held-out reward {before:.3f} -> {after:.3f} after {STEPS} steps"


def test_a_negated_reward_unlearns(folder):
    assert held_out(folder, "negated", 15, **{"rewards.ocr.weight": -1.0})[-1] < 0.15


def test_shuffled_advantages_do_not_learn(true_run, folder):
    shuffled = held_out(folder, "shuffled", STEPS, **{"advantage.control": "shuffled"})[-1]
    assert shuffled <= true_run[-1] - 0.15, f"shuffled {shuffled:.3f}, true {true_run[-1]:.3f}"
