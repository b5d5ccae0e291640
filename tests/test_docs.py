"""The documentation names what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from flowgrpo_ray.config import load
from flowgrpo_ray.rewards import known_rewards

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_every_reward_has_a_line_in_the_table():
    table = [line for line in (ROOT / "docs/rewards.md").read_text().splitlines() if line.startswith("| `")]
    named = {name for line in table for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert named == set(known_rewards())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_the_reward_examples_are_configurations():
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/rewards.md").read_text(), re.S)
    assert len(blocks) == 4
    for block in blocks:
        tree = yaml.safe_load(block)
        assert load(None, tree).rewards.keys() == tree["rewards"].keys()
