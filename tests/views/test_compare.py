"""Two runs in one page."""

import json

import numpy as np
import pytest
from command import cli
from plain_images import png
from test_report import Page

from flowgrpo_ray import storage
from flowgrpo_ray.run_dir import metrics
from flowgrpo_ray.run_dir import sample_table as samples
from flowgrpo_ray.run_dir.run_data import RunData
from flowgrpo_ray.views import compare

EVIL = "<script>alert(1)</script>"


def write_run(folder, *, seed, scale=1.0, rewards=("ocr",), color="red", grid_seeds=(1, 2)):
    run_dir, writer = str(folder), metrics.MetricsWriter(str(folder))
    for step in range(13):
        row = {"step": step, "time_total": 3.0 * scale * step}
        if step:
            row |= {"images": 96.0 * scale} | {f"reward_mean/{name}": 0.1 * step * scale for name in rewards}
        if step in (0, 12):
            row |= {f"eval/policy/{name}": 0.1 + 0.02 * step * scale for name in rewards}
        writer.append(row)
    writer.flush()
    images = [samples.GridImage(png(color), f"{EVIL} {i}", i, {"ocr": 0.5}) for i in grid_seeds]
    samples.write_grid(run_dir, "policy", 12, samples.png_grid(images))
    config = {"run": {"name": EVIL, "dir": str(folder)}, "train": {"seed": seed, "betas": [0.9, 0.999]},
              "rewards": {name: {"weight": 1.0, "options": {}, "python": None} for name in rewards}}
    storage.write_bytes(storage.join(run_dir, "config.yaml"), json.dumps(config).encode())
    return run_dir


def test_the_page_holds_what_differs_the_curves_and_the_images(tmp_path):
    a = write_run(tmp_path / "a", seed=1)
    b = write_run(tmp_path / "b", seed=2, scale=2.0, rewards=("ocr", "sharp"), color="blue", grid_seeds=(2, 3))
    out = tmp_path / "compare.html"
    assert cli("compare", a, b, "--out", out).output.strip() == str(out)
    text = out.read_text()
    page = Page(text)
    assert "script" not in page.tags and EVIL in "".join(page.words)
    assert all(link.startswith("data:image/") for link in page.links), "the page refers to nothing outside"
    assert "Reward against images" in text and "Reward against time" in text
    assert text.count("<h3>ocr</h3>") == text.count("<h3>sharp</h3>") == 2
    assert text.count('class="side"') == 1, "seed 2 is the one that both have"
    assert "+0.24" in text and "none" in text


def test_what_differs(tmp_path):
    a = write_run(tmp_path / "a", seed=1)
    b = write_run(tmp_path / "b", seed=2, rewards=("ocr", "sharp"))
    assert compare.changes(RunData.read(a), RunData.read(b)) == [
        ("train.seed", "1", "2"), ("rewards.sharp", "–", "weight: 1.0")]
    assert compare.changes(RunData.read(a), RunData.read(a)) == []


def test_axes(tmp_path):
    run = RunData.read(write_run(tmp_path / "a", seed=1))
    assert compare.positions(run.rows, "images")[:3] == [0, 96, 192]
    assert compare.positions(run.rows, "time_total")[:3] == [0, 3, 6]
    assert np.isnan(compare.positions([{"step": 1}], "time_total")[0])


@pytest.mark.parametrize("missing", ["metrics", "samples", "config.yaml"])
def test_runs_that_have_only_begun(tmp_path, missing):
    a, b = write_run(tmp_path / "a", seed=1), write_run(tmp_path / "b", seed=2)
    (tmp_path / "a" / missing).rename(tmp_path / "elsewhere")
    text = compare.render(a, b)
    assert ("share no prompt and seed" in text) == (missing == "samples")


def test_an_unknown_run_is_named(tmp_path):
    a = write_run(tmp_path / "first", seed=1)
    assert "did you mean first?" in cli("compare", a, tmp_path / "firts", code=2).stderr
