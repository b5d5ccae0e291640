"""The documentation names what there is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.main import get_command

from flowgrpo_ray.cli.main import app
from flowgrpo_ray.config import load
from flowgrpo_ray.rewards import get, known_rewards, validated

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_every_reward_has_a_line_in_the_table():
    table = [line for line in (ROOT / "docs/rewards.md").read_text().splitlines() if line.startswith("| `")]
    named = {name for line in table for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert named == set(known_rewards())


def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
        if not target.startswith("http"):
            there = page.parent / target if target else page
            assert there.exists(), target
            assert not anchor or anchor in anchors(there), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page):
    known = get_command(app).commands
    blocks = re.findall(r"```(?:bash)?\n(.*?)```|((?:^    .+\n)+)", page.read_text(), re.S | re.M)
    lines = [line for pair in blocks for block in pair for line in block.splitlines()]
    lines += re.findall(r"`(flowgrpo-ray [^`]+)`", page.read_text())
    for line in lines:
        if found := re.match(r" *flowgrpo-ray ([a-z-]+)(.*)", line):
            name, rest = found.groups()
            assert name in known, line
            options = {option for parameter in known[name].params for option in parameter.opts}
            assert {"--help", *options} >= set(re.findall(r" (--[a-z-]+)", rest.split("|")[0])), line


def test_the_reward_examples_are_configurations():
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/rewards.md").read_text(), re.S)
    assert len(blocks) == 4
    for block in blocks:
        tree = yaml.safe_load(block)
        assert load(None, tree).rewards.keys() == tree["rewards"].keys()


def test_the_rewards_of_ones_own_score(tmp_path, monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/rewards.md").read_text(), re.S)
    assert len(blocks) == 2
    model = "\ndef load(path):\n    return lambda images: images.reshape(len(images), -1).max(axis=1) / 255\n"
    (tmp_path / "documented.py").write_text("\n".join(blocks) + model)
    monkeypatch.syspath_prepend(tmp_path)
    images = np.zeros((2, 8, 8, 3), np.uint8)
    images[1, :4] = 255
    for name, key in (("contrast", "contrast"), ("Sharpness", "sharpness")):
        reward = get(f"documented:{name}")
        reward.self_test()
        scores = validated(reward.score(images, ["a", "b"], [{}, {}]), 2, key, range=reward.range)[key]
        assert scores[0] == 0 and scores[1] == 1


def fixed_texts() -> list[str]:
    """Every string of the code, adjacent parts joined, with a NUL for each value that is put in."""
    found = []
    for file in [*(ROOT / "flowgrpo_ray").rglob("*.py"), *(ROOT / "actors").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[-.\d]*[a-z]", "\0", node.value))
    return found


def quoted_messages() -> list[str]:
    """What the pages quote of messages: bold in troubleshooting.md, first in the rows of warnings in operations.md."""
    entries = [line for line in (ROOT / "docs/troubleshooting.md").read_text().splitlines()
               if line.startswith("**`") and not line.endswith("'s)")]
    table = (ROOT / "docs/operations.md").read_text().split("| WARNING |")[1].split("\n\n")[0].splitlines()[2:]
    return [text for line in entries + [row.split("|")[1] for row in table] for text in re.findall(r"`([^`]+)`", line)]


def test_quoted_messages_are_in_the_code():
    texts, quoted = fixed_texts(), quoted_messages()
    assert len(quoted) > 50
    unknown = [message for message in quoted for part in re.split(r"…|\b[NMPR]\b", message)
               if not any(part.strip(" :;,.()") in text for text in texts)]
    assert unknown == []
