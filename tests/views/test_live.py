"""What a person sees of a run: the live view, plain lines, and log records."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from flowgrpo_ray.config import Config, load
from flowgrpo_ray.run_dir.metrics import MetricsWriter
from flowgrpo_ray.views.live import LiveView, PlainView, print_summary, set_up_logging, sparkline
from flowgrpo_ray.views.status import duration


@pytest.fixture(autouse=True)
def root_logger():
    """Logging is set up for the whole process; here that is the tests' own."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in ("flowgrpo_ray", "actors"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def small(overrides: list[str]) -> Config:
    return load(None, ["rewards={jpeg_compressibility: {}}", "run.name=small", *overrides])


ROWS = [
    {"step": 0, "eval/policy/jpeg_compressibility": -0.5, "eval/ema/jpeg_compressibility": -0.5},
    {"step": 1, "reward_mean/jpeg_compressibility": -0.4, "kl": 0.25, "clip_fraction": 0.125, "images_per_s": 12.5,
     "time_step": 30.0, "eval/policy/jpeg_compressibility": -0.3, "eval/ema/jpeg_compressibility": -0.45},
]


def test_plain_view_is_a_line_per_step():
    out = io.StringIO()
    config = small(["run.steps=5", "loss.beta=0.1"])
    with PlainView(config, Console(file=out, width=40)) as view:
        view.say("hello [world]")
        for row in ROWS:
            view.row(row)
    assert out.getvalue().splitlines() == [
        "hello [world]",
        "step 0/5  evaluation: jpeg_compressibility -0.5000, jpeg_compressibility -0.5000 (ema)",
        "step 1/5  jpeg_compressibility -0.4000  kl 0.25  clip 0.125  images/s 12.5  30.0 s  evaluation: "
        "jpeg_compressibility -0.3000, jpeg_compressibility -0.4500 (ema)  about 2 min 0 s left",
    ]


def test_a_line_counts_images_without_score():
    out = io.StringIO()
    with PlainView(small(["run.steps=5"]), Console(file=out, width=400)) as view:
        view.row({**ROWS[1], "masked_samples": 0.0})
        view.row({**ROWS[1], "masked_samples": 8.0})
    first, second = out.getvalue().splitlines()
    assert "without score" not in first and "  8 images without score  " in second


def test_live_view_shows_numbers_actors_events_and_warnings():
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, color_system=None)
    set_up_logging("info", console)
    with LiveView(small(["run.steps=5"]), console) as view:
        view.say("starting 9 actors")
        for row in ROWS:
            view.row(row)
        view.activity({"rollout": ["sample step 2 group 0 shard 1", "idle"], "learner": ["accumulate"],
                       "reward.ocr": ["score a"] * 3 + ["idle"] * 2 + ["draining: score b"]})
        logging.getLogger("actors.pool").warning("pool rollout: actor 1 died (it [was] killed)")
        logging.getLogger("actors.pool").info("waiting")
        logging.getLogger("diffusers").info("chatter")
        above = out.getvalue()
        out.truncate(0)
        view._live.refresh()
        text = out.getvalue()
    assert "starting 9 actors" in above and "starting 9 actors" not in text
    for part in ("small", "step 1/5", "about 2 min 0 s left", "-0.4000", "evaluation -0.500 -> -0.300", "KL 0.25",
                 "clip fraction 0.125", "images/s 12.5", "sample step 2 group 0 shard 1", "3 score, 2 idle, 1 draining",
                 "accumulate", "evaluation at step 1",
                 "1 warning, the last: pool rollout: actor 1 died (it [was]"):
        assert part in text, part


def test_a_resumed_run_is_shown_from_its_step_on():
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, color_system=None)
    with LiveView(small(["run.steps=5"]), console) as view:
        view.resumes(3)
        above = out.getvalue()
        out.truncate(0)
        view._live.refresh()
        text = out.getvalue()
    assert "resuming from step 3" in above and "step 3/5" in text


def test_log_records_are_printed_above_the_live_view():
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, color_system=None)
    set_up_logging("info", console)
    with LiveView(small([]), console):
        logging.getLogger("actors.pool").info("waiting for [things]")
        logging.getLogger("actors.pool").debug("detail")
        logging.getLogger("diffusers").info("chatter")
    assert "waiting for [things]" in out.getvalue()
    assert "detail" not in out.getvalue() and "chatter" not in out.getvalue()


def test_small_forms():
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█" and sparkline([2.0, 2.0]) == "▄▄" and sparkline([float("nan")]) == ""
    assert [duration(s) for s in (4.4, 200, 7500)] == ["4 s", "3 min 20 s", "2 h 5 min"]


def test_the_summary_compares_two_evaluations_and_shows_a_single_one(tmp_path):
    writer, config = MetricsWriter(str(tmp_path), flush_every=1), load(None, {"rewards": {"ocr": {}}})

    def said() -> str:
        console = Console(file=io.StringIO(), width=120, force_terminal=False)
        print_summary(config, str(tmp_path), console)
        return console.file.getvalue()

    writer.append({"step": 2, "eval/policy/ocr": 0.5, "eval_std/policy/ocr": 0.5, "eval_images/policy": 25})
    assert "prompts, step 2 (" in said() and "before" not in said() and said().count("0.5000 ± 0.1000") == 1
    writer.append({"step": 4, "eval/policy/ocr": 0.75})
    assert "prompts, step 2 and step 4 (" in said() and "before" in said() and "+0.2500" in said()


@pytest.mark.parametrize(("prompts", "evaluated", "why"), [
    (None, {}, "data.eval_prompts is not set"),
    ("builtin:tiny/heldout.txt", {}, "evaluations are off: eval.every_steps, eval.at_start and eval.at_end"),
    ("builtin:tiny/heldout.txt", {"eval_images/policy": 0.0}, "no reward scores images one by one"),
])
def test_the_summary_says_why_there_is_no_evaluation(tmp_path, prompts, evaluated, why):
    writer = MetricsWriter(str(tmp_path), flush_every=1)
    config = load(None, {"rewards": {"ocr": {}}, "data.eval_prompts": prompts})
    writer.append({"step": 1, "reward_mean/ocr": 0.5, **evaluated})
    console = Console(file=io.StringIO(), width=200, force_terminal=False)
    print_summary(config, str(tmp_path), console)
    assert f"ocr on the training prompts: 0.5000 at first, 0.5000 at last ({why})" in console.file.getvalue()
