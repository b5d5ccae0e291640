import base64
import io
import json
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image
from plain_images import png

from flowgrpo_ray import storage
from flowgrpo_ray.errors import FlowGrpoError
from flowgrpo_ray.run_dir import metrics, watch
from flowgrpo_ray.run_dir import sample_table as samples
from flowgrpo_ray.views import charts, grids, panels, report

pytest_plugins = ["s3_server"]

EVIL = "<script>alert('prompt')</script> & \"quotes\" {{ 7 * 7 }} $\\frac$"


def row(step):
    wave = math.sin(step)
    values = {
        "step": step, "reward_mean/ocr": 0.2 + 0.01 * step + 0.02 * wave, "reward_std/ocr": 0.1, "kl": 1e-3 * step,
        "approx_kl": 1e-6 * (1.2 + wave), "clip_fraction": 0.2, "clip_fraction_low": 0.1, "clip_fraction_high": 0.1,
        "grad_norm": math.exp(wave), "images_per_s": 40 + wave, "images": 96, "masked_samples": float(step == 7),
        "zero_std_group_fraction": 0.25, "staleness": 0, "scoring_failures/ocr": float(step >= 7),
        "actor_deaths/reward.ocr": 0.0, "adapter_delta_norm": 0.01, "time_step": 3.0, "time_sample_call": 2.0,
    } | {f"busy_share/{role}": 0.5 + 0.1 * wave for role in ("rollout", "reward", "learner")} | {
        f"ratio_mean/{j}": 1 + 1e-5 * wave * j for j in range(3)} | {f"ratio_std/{j}": 1e-5 * (j + 1) for j in range(3)}
    if step % 10 == 0:
        values |= {f"eval/{w}/ocr": 0.25 + 0.01 * step + shift for w, shift in (("policy", 0.0), ("ema", 0.02))}
        values |= {"eval_std/policy/ocr": 0.2, "eval_images/policy": 100.0}
    return values


def make_run(run_dir, steps=21, evil=EVIL):
    writer, sampler = metrics.MetricsWriter(run_dir), samples.SampleWriter(run_dir)
    for step in range(steps):
        writer.append(row(step) if step else {"step": 0, "eval/policy/ocr": 0.25, "eval/ema/ocr": 0.27})
        if step:
            for group in range(2):
                scores = np.array([0.1, 0.3, np.nan]) + group
                sampler.append_group(step, group, evil if group else "a sign", rewards={"ocr": scores},
                                     valid=np.array([True, True, False]), advantages=np.zeros(3), total=scores, seeds=[1, 2, 3])
        if step % 10 == 0:
            for weights in ("policy", "ema"):
                pairs = [samples.GridImage(png(color), f"{evil} {color}", seed, {"ocr": step / 40 + seed / 9})
                         for seed, color in enumerate(("red", "blue"))]
                samples.write_grid(run_dir, weights, step, samples.png_grid(pairs))
    writer.flush()
    sampler.flush()
    config = f"run:\n  name: {evil!r}\n  steps: 40\n  dir: s3://key:secret@bucket/runs\neval:\n  weights: policy\n"
    storage.write_bytes(storage.join(run_dir, "config.yaml"), config.encode())


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.words = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "srcset", "href")]

    def handle_data(self, data):
        self.words.append(data)


def test_report_of_a_whole_run(run_dir):
    make_run(run_dir)
    uri = report.write_report(run_dir)
    text = storage.read_bytes(uri).decode()
    page = Page(text)
    assert uri.partition("?")[0].endswith("/report.html")
    assert "Evaluation, before and after" in text and "+0.2" in text and "± 0.02" in text
    assert "step 0</span>" in text and "step 20</span>" in text
    for title in ("Training reward: ocr", "Evaluation: ocr", "KL to the reference", "Approximate KL", "Clip fraction",
                  "Mean ratio", "Gradient norm", "Throughput", "Busy share", "Failures", "Adapter change"):
        assert f"<h3>{title}</h3>" in text, title
    assert len(re.findall(r'<h3>Step \d+ <span class="tag">', text)) == 6  # two kinds of weights at steps 0, 10, 20
    for link in page.links:
        assert link.startswith("data:image/"), "the page refers to nothing outside"
        Image.open(io.BytesIO(base64.b64decode(link.partition(",")[2]))).verify()


def test_untrusted_text_is_escaped(tmp_path):
    make_run(str(tmp_path), steps=3)
    text = report.render(str(tmp_path))
    page = Page(text)
    assert "script" not in page.tags
    assert EVIL in "".join(page.words)  # shown as it is, in the prompt table
    assert "&lt;script&gt;" in text and "49 $" not in text
    assert "secret" not in text


def test_a_run_that_has_only_begun(tmp_path):
    text = report.render(str(tmp_path))
    assert "No metrics on file yet" in text and "No config.yaml" in text
    metrics.MetricsWriter(str(tmp_path), 1).append({"step": 0, "eval/policy/ocr": 0.25})
    assert "not yet" in report.render(str(tmp_path))


@pytest.mark.parametrize("missing", ["metrics", "samples", "config.yaml"])
def test_missing_parts(tmp_path, missing):
    make_run(str(tmp_path), steps=4)
    path = tmp_path / missing
    path.rename(tmp_path / "elsewhere")
    text = report.render(str(tmp_path))
    assert ("Training reward" in text) == (missing != "metrics")
    assert ("Prompts of step 3" in text) == (missing != "samples")


def test_values_that_are_not_finite(tmp_path):
    writer = metrics.MetricsWriter(str(tmp_path), 1)
    writer.append({"step": 1, "grad_norm": math.inf, "kl": math.nan})
    text = report.render(str(tmp_path))
    assert "Gradient norm</h3>" not in text and re.search(r"grad_norm</code></td><td class=\"num\">inf", text)
    writer.append({"step": 2, "grad_norm": 0.0, "kl": 1.0, "eval/policy/$x^": 1.0})  # no log axis, no formula
    assert "Gradient norm</h3>" in report.render(str(tmp_path))


def test_no_failures_is_said(tmp_path):
    metrics.MetricsWriter(str(tmp_path), 1).append({"step": 1, "kl": 0.1, "timeouts/rollout": 0})
    assert "None on record" in report.render(str(tmp_path))


def test_a_damaged_file_is_named(tmp_path):
    make_run(str(tmp_path), steps=4)
    part = next(iter((tmp_path / "samples").glob("*.parquet")))
    part.write_bytes(part.read_bytes()[:-9])
    with pytest.raises(FlowGrpoError, match=f"{part.name} is damaged"):
        report.render(str(tmp_path))


def test_grids_are_thinned_and_scaled(tmp_path):
    for step in range(30):
        grid = samples.png_grid([samples.GridImage(png("red", (300, 20)))] * 6)
        samples.write_grid(str(tmp_path), "policy", step, grid)
    found = grids.whole_grids(str(tmp_path))
    assert [step for step, _ in found] == [0, 6, 12, 17, 23, 29]
    data = base64.b64decode(found[0][1][0].image.partition(",")[2])
    assert Image.open(io.BytesIO(data)).width == 1280


def test_evaluation_compares_first_and_last():
    rows = [{"step": 0, "eval/policy/ocr": 0.5, "eval_std/policy/ocr": 0.2, "eval_images/policy": 16}, {"step": 1},
            {"step": 2, "eval/policy/ocr": 0.75}]
    (line,) = report.evaluation(rows, {})
    assert (line.first_step, line.last_step, line.change) == (0, 2, 0.25)
    assert line.first_error == pytest.approx(0.05) and line.last_error is None and line.direction == 0
    rows = [{"step": 0} | {f"eval/{w}/{r}": 0.5 for w in ("policy", "ema") for r in ("a", "b", "c")}]
    found = report.evaluation(rows, {"rewards": {"c": {"weight": -1.0}, "b": {}}, "eval": {"weights": "ema"}})
    assert [(line.reward, line.weights, line.headline, line.direction) for line in found] == [
        ("c", "ema", True, -1), ("c", "policy", False, -1), ("b", "ema", True, 1), ("b", "policy", False, 1),
        ("a", "ema", True, 0), ("a", "policy", False, 0)]


def test_window_steps_are_in_natural_order():
    rows = [{"step": 1} | {f"ratio_mean/{j}": 1.0 for j in (10, 2, 0)}]
    assert [line.label for line in panels.family(rows, "ratio_mean")] == ["0", "2", "10"]


def test_smoothing_does_not_lag():
    xs = [1.0, 2.0, 3.0, 5.0, 8.0, 9.0, 12.0, *range(13, 60)]
    line = [0.3 + 0.02 * x for x in xs]
    assert charts.smoothed(xs, line, charts.width_of(xs)) == pytest.approx(line), "a ramp stays where it is, ends included"
    rng = np.random.default_rng(0)
    steps = list(range(200))
    noisy = [1 / (1 + math.exp((100 - x) / 10)) + 0.1 * rng.standard_normal() for x in steps]
    found = charts.smoothed(steps, noisy, 6.0)
    crossing = next(x for x, y in zip(steps, found, strict=True) if y > 0.5)
    assert abs(crossing - 100) <= 2, "where the curve itself crosses a half"
    assert charts.smoothed([1, 2], [5.0, 7.0], 1.5) == pytest.approx([5.0, 7.0])


def weighted_run(run_dir, combine="gdpo", steps=30):
    """A dark image scores well, and words are lost."""
    writer, sampler = metrics.MetricsWriter(run_dir), samples.SampleWriter(run_dir)
    for step in range(1, steps + 1):
        t = step / steps
        writer.append({"step": step, "reward_mean/ocr": 0.45 * (1 - t), "reward_std/ocr": 0.3, "reward_group_std/ocr": 0.3,
                       "reward_mean/dark": 0.5 + 0.2 * t, "reward_std/dark": 0.02, "reward_group_std/dark": 0.017,
                       "reward_mean/sharp": 0.9 - 0.6 * t, "reward_std/sharp": 0.1, "time_total": 3.0 * step})
        scores = np.array([0.1, 0.3]) * (1 - t)
        sampler.append_group(step, 0, "a", rewards={"ocr": scores, "dark": scores + 0.5}, valid=np.ones(2, bool),
                             advantages=np.zeros(2), total=2 * scores + 0.5, seeds=[1, 2])
    writer.flush()
    sampler.flush()
    for step, color in ((0, "white"), (steps, "black")):
        images = [samples.GridImage(png(color), f"prompt {i}", i, {"ocr": 0.1 * i, "dark": 0.5}) for i in range(5)]
        samples.write_grid(run_dir, "policy", step, samples.png_grid(images))
    config = {"run": {"name": "lost"}, "train": {"seed": 7},
              "model": {"path": "builtin:tiny"}, "advantage": {"combine": combine},
              "rewards": {"ocr": {"weight": 1.0}, "dark": {"weight": 1.0}, "sharp": {"weight": 0}}}
    storage.write_bytes(storage.join(run_dir, "config.yaml"), json.dumps(config).encode())
    first = {"step": 0, "time": "2026-01-02T03:04:05+00:00", "versions": {"torch": "2.12.0", "flowgrpo-ray": "0.1.0"},
             "commit": {"id": "a" * 40, "dirty": True}}
    starts = [first, first | {"step": 10, "versions": {"torch": "2.13.0", "flowgrpo-ray": "0.1.0"}}]
    storage.write_bytes(storage.join(run_dir, "run.json"), json.dumps({"run_id": "x", "starts": starts}).encode())


def test_what_was_lost_stands_beside_the_curve(tmp_path):
    weighted_run(str(tmp_path))
    text = report.render(str(tmp_path))
    assert "The optimised reward ocr collapses: training mean 0.4" in text and "lower the weight of dark" in text
    lost = text[text.index("Scores that got worse"):text.index("Same prompt, same noise")]
    assert re.search(r"ocr <span class=\"tag\">optimised", lost) and re.search(r"sharp <span class=\"tag\">monitor", lost)
    assert "dark" not in lost
    assert text.count('class="side"') == 5, "a pair for every image of the grids"
    assert text.count("step 0</span>") == text.count("step 30</span>") == 5


def test_the_page_says_what_was_run(tmp_path):
    weighted_run(str(tmp_path))
    text = report.render(str(tmp_path))
    for fact in ("<dd>7</dd>", "1 min 30 s", "aaaaaaaaaaaa, with uncommitted changes", "torch 2.13.0", "builtin:tiny",
                 "started 2026-01-02 03:04:05 UTC; resumed from step 10 2026-01-02 03:04:05 UTC (torch 2.12.0 → 2.13.0)"):
        assert fact in text, fact


def test_histograms_and_gallery(tmp_path):
    weighted_run(str(tmp_path))
    text = report.render(str(tmp_path))
    assert "Scores, at first and at last" in text and "<h3>dark</h3>" in text
    ends = grids.ends(str(tmp_path), "policy")
    found = report.gallery(ends, {"rewards": {"ocr": {}, "dark": {"weight": 0.0}}})
    assert [shot.label for shot in found.best] == ["prompt 4", "prompt 3"]
    assert [shot.label for shot in found.worst] == ["prompt 0", "prompt 1"]
    assert found.best[0].scores == [("ocr", 0.4), ("dark", 0.5)]
    assert report.gallery(ends, {"rewards": {"absent": {}}}) is None, "an image without its score is not ranked"
    worst = report.gallery(ends, {"rewards": {"ocr": {"weight": -1.0}}}).best
    assert worst[0].label == "prompt 0", "a negative weight turns the order round"


def test_images_pair_by_prompt_seed_and_size():
    def image(prompt, seed, size=(8, 8)):
        return samples.GridImage(png("red", size), prompt, seed)

    before = [image("a", 1), image("b", 2), image("c", 3), image("d", None)]
    after = [image("b", 2), image("a", 9), image("c", 3, (4, 8)), image("d", None)]
    assert [(x.prompt, y.prompt) for x, y in grids.same_noise(before, after)] == [("b", "b")]
    assert grids.difference(image("a", 1), samples.GridImage(png((255, 0, 30)), "a", 1)) == 10


def test_the_total_curve_says_what_is_optimised(tmp_path):
    weighted_run(str(tmp_path))
    rows = metrics.read_metrics(str(tmp_path))
    rewards = {"ocr": {"weight": 2.0}, "dark": {"weight": -1.0}, "sharp": {"weight": 0.0}}
    steps, values = watch.total_series(rows, {"rewards": rewards})
    assert values[0] == pytest.approx(2 * rows[0]["reward_mean/ocr"] - rows[0]["reward_mean/dark"])
    steps, values = watch.total_series(rows, {"rewards": rewards, "advantage": {"combine": "gdpo"}})
    assert steps == list(range(1, 31)) and values[0] == 0
    assert values[-1] == pytest.approx(2 * -0.435 / 0.3001 - (0.2 * 29 / 30) / 0.0171)
    assert panels.headline(rows, {"rewards": rewards}, "policy").title == "Total reward"
    assert panels.headline(rows, {"rewards": {"ocr": {}}}, "policy").title == "Reward: ocr"
    assert panels.headline([], {"rewards": rewards}, "policy") is None
