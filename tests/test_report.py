import base64
import io
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from flowgrpo_ray import charts, metrics, report, samples, storage
from flowgrpo_ray.errors import FlowGrpoError

pytest_plugins = ["s3_server"]

EVIL = "<script>alert('prompt')</script> & \"quotes\" {{ 7 * 7 }} $\\frac$"


def png(color, size=(8, 8)):
    sink = io.BytesIO()
    Image.new("RGB", size, color).save(sink, "PNG")
    return sink.getvalue()


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
                                     valid=np.array([True, True, False]), advantages=np.zeros(3))
        if step % 10 == 0:
            for weights in ("policy", "ema"):
                samples.write_grid(run_dir, weights, step, [png("red"), png("blue")])
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
    assert text.count('class="tag"') == 6  # grids of two kinds of weights at steps 0, 10, 20
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
        samples.write_grid(str(tmp_path), "policy", step, [png("red", (300, 20))] * 6)
    found = report.grids(str(tmp_path))
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
    assert [line.label for line in charts.family(rows, "ratio_mean")] == ["0", "2", "10"]
