import io
import math
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from plain_images import png

from flowgrpo_ray import storage
from flowgrpo_ray.errors import FlowGrpoError
from flowgrpo_ray.run_dir import metrics
from flowgrpo_ray.run_dir import sample_table as samples

pytestmark = pytest.mark.usefixtures("ieee_floats")

pytest_plugins = ["s3_server"]


def bits(value):
    return struct.pack("<d", value)


def rows(*steps):
    return [{"step": step, "kl": step / 3, "reward_mean/ocr": math.sin(step)} for step in steps]


def write(run_dir, *steps, flush_every=3):
    writer = metrics.MetricsWriter(run_dir, flush_every)
    for row in rows(*steps):
        writer.append(row)
    writer.flush()
    return writer


def parts(run_dir, folder="metrics"):
    return storage.list_dir(storage.join(run_dir, folder))


def test_rows_come_back_in_step_order(run_dir):
    assert metrics.read_metrics(run_dir) == []
    write(run_dir, *range(12))
    assert metrics.read_metrics(run_dir) == rows(*range(12))
    assert parts(run_dir)[0] == "part-00000000-00000002.jsonl" and len(parts(run_dir)) == 4


@given(values=st.lists(st.floats(), min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_floats_keep_every_bit(tmp_path_factory, values):
    run_dir = str(tmp_path_factory.mktemp("bits"))
    writer = metrics.MetricsWriter(run_dir, 1)
    writer.append({"step": 0} | {f"ratio_mean/{i}": value for i, value in enumerate(values)})
    (row,) = metrics.read_metrics(run_dir)
    for i, value in enumerate(values):
        found = row[f"ratio_mean/{i}"]
        assert math.isnan(found) if math.isnan(value) else bits(found) == bits(value)


@pytest.mark.parametrize("after", [-1, 0, 1, 2, 3, 7, 10, 11, 50])
def test_truncate_and_go_on_equals_never_stopped(tmp_path, after):
    run_dir = str(tmp_path)
    write(run_dir, *range(12))
    writer = metrics.MetricsWriter(run_dir, 5)
    writer.truncate(after)
    assert metrics.read_metrics(run_dir) == rows(*range(min(after + 1, 12)))
    for row in rows(*range(min(after + 1, 12), 20)):
        writer.append(row)
    writer.flush()
    assert metrics.read_metrics(run_dir) == rows(*range(20))


def test_truncate_on_an_object_store(s3_run_dir):
    writer = write(s3_run_dir, *range(8))
    writer.truncate(4)
    assert metrics.read_metrics(s3_run_dir) == rows(*range(5))
    assert parts(s3_run_dir) == ["part-00000000-00000002.jsonl", "part-00000003-00000004.jsonl"]


def test_truncate_takes_pending_rows_too(tmp_path):
    writer = metrics.MetricsWriter(str(tmp_path), 100)
    for row in rows(0, 1, 2):
        writer.append(row)
    writer.truncate(1)
    writer.append(rows(2)[0])
    writer.flush()
    assert metrics.read_metrics(str(tmp_path)) == rows(0, 1, 2)


@pytest.mark.parametrize("place", ["write_bytes", "delete_file"])
def test_a_truncation_that_crashed_is_finished_by_the_next(tmp_path, monkeypatch, place):
    run_dir = str(tmp_path)
    write(run_dir, *range(6), flush_every=6)

    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(storage, place, crash)
    with pytest.raises(KeyboardInterrupt):
        metrics.MetricsWriter(run_dir).truncate(2)
    monkeypatch.undo()
    assert metrics.read_metrics(run_dir) == rows(*range(6))  # nothing lost, nothing twice
    metrics.MetricsWriter(run_dir).truncate(2)
    assert metrics.read_metrics(run_dir) == rows(0, 1, 2)


def test_steps_rise_and_earlier_lives_are_cut_first(tmp_path):
    write(str(tmp_path), 0, 1, 2)
    with pytest.raises(FlowGrpoError, match="a row of step 2 after one of step 2"):
        metrics.MetricsWriter(str(tmp_path)).append({"step": 2})


def test_unknown_metrics_name_the_nearest(tmp_path):
    writer = metrics.MetricsWriter(str(tmp_path))
    with pytest.raises(FlowGrpoError, match="no metric is named 'aprox_kl'; did you mean approx_kl"):
        writer.append({"step": 0, "aprox_kl": 1.0})
    with pytest.raises(FlowGrpoError, match="must have the form reward_mean/<reward>"):
        writer.append({"step": 0, "reward_mean": 1.0})
    with pytest.raises(FlowGrpoError, match="must have the form kl"):
        writer.append({"step": 0, "kl/x": 1.0})
    with pytest.raises(FlowGrpoError, match="must have the form eval/<weights>/<reward>"):
        writer.append({"step": 0, "eval/policy": 1.0})


def test_table_of_metrics():
    names = [metric.name for metric in metrics.METRICS]
    assert len(names) == len(set(names))
    metric, labels = metrics.find("eval/ema/geneval/color")
    assert labels == {"weights": "ema", "reward": "geneval/color"} and metric.prometheus == "flowgrpo_eval"
    assert all(m.machine for m in metrics.METRICS if m.name.startswith("time_") or m.name.endswith("_per_s"))
    assert metrics.deterministic({"step": 1, "kl": 2.0, "time_step": 3.0, "busy_share/rollout": 0.5}) == \
        {"step": 1, "kl": 2.0}
    assert "| `reward_mean/<reward>` | gauge | score |" in metrics.table()


def test_a_damaged_part_is_named(tmp_path):
    write(str(tmp_path), 0, 1, 2)
    part = tmp_path / "metrics/part-00000000-00000002.jsonl"
    part.write_bytes(part.read_bytes()[:-5])
    with pytest.raises(FlowGrpoError, match="part-00000000-00000002.jsonl, line 3 is damaged"):
        metrics.read_metrics(str(tmp_path))


# samples

def add_samples(writer, *steps):
    for step in steps:
        for group in range(2):
            scores = np.sin(np.arange(3.0) + 10 * step + group)
            writer.append_group(step, group, f"prompt {group}", rewards={"ocr": scores}, valid=np.ones(3, bool),
                                advantages=scores - scores.mean(), total=2 * scores, seeds=[5 + group, 6, 7])


def test_samples_round_trip_and_truncate(run_dir):
    assert samples.read_samples(run_dir) is None
    writer = samples.SampleWriter(run_dir, flush_every=2)
    add_samples(writer, *range(5))
    writer.flush()
    whole = samples.read_samples(run_dir)
    assert whole.num_rows == 30
    assert whole.column_names == [
        "step", "group", "sample", "prompt", "seed", "reward:ocr", "total", "valid", "advantage"]
    assert parts(run_dir, "samples") == [
        "part-00000000-00000001.parquet", "part-00000002-00000003.parquet", "part-00000004-00000004.parquet"]
    np.testing.assert_array_equal(whole["reward:ocr"][:3], np.sin(np.arange(3.0)))
    np.testing.assert_array_equal(whole["total"][:3], 2 * np.sin(np.arange(3.0)))
    assert whole["seed"][:6].to_pylist() == [5, 6, 7, 6, 6, 7]
    for step in (0, 2, 4):
        samples.write_grid(run_dir, "policy", step, png("red"))
    again = samples.SampleWriter(run_dir)
    with pytest.raises(FlowGrpoError, match="a group of step 4 after those of step 4"):
        add_samples(again, 4)
    again.truncate(2)
    assert samples.read_samples(run_dir).equals(whole.slice(0, 18))
    assert [(weights, step) for weights, step, _ in samples.list_grids(run_dir)] == [("policy", 0), ("policy", 2)]
    add_samples(again, 3, 4)
    again.flush()
    assert samples.read_samples(run_dir).equals(whole)


def test_a_score_that_does_not_exist_is_null_never_0(tmp_path):
    writer = samples.SampleWriter(str(tmp_path))
    writer.append_group(1, 0, "p", rewards={"ocr": np.array([0.5, np.nan])}, valid=np.array([True, False]),
                        advantages=np.zeros(2), total=np.array([0.5, np.nan]), seeds=[1, 2])
    writer.append_group(1, 1, "q", rewards={"ocr": np.ones(2), "aesthetic": np.ones(2)}, valid=np.ones(2, bool),
                        advantages=np.zeros(2), total=np.ones(2), seeds=[3, 4])
    with pytest.raises(FlowGrpoError, match=r"has 2 samples, but \['ocr'\] have another length"):
        writer.append_group(1, 2, "r", rewards={"ocr": np.ones(3)}, valid=np.ones(2, bool), advantages=np.zeros(2),
                            total=np.ones(2), seeds=[1, 2])
    writer.flush()
    table = samples.read_samples(str(tmp_path))
    assert table["reward:ocr"].to_pylist() == [0.5, None, 1.0, 1.0]
    assert table["reward:aesthetic"].to_pylist() == [None, None, 1.0, 1.0]
    assert table["total"].to_pylist() == [0.5, None, 1.0, 1.0]


def test_grid(run_dir):
    images = [samples.GridImage(p) for p in (png("red"), png("green", (4, 4)), png("blue"), png("black"), png("red"))]
    data = samples.png_grid(images, 3)
    uri = samples.write_grid(run_dir, "ema", 7, data)
    assert samples.list_grids(run_dir) == [("ema", 7, uri)] and storage.read_bytes(uri) == data
    assert uri.partition("?")[0].endswith("samples/grids/ema_step_000007.png")
    grid = Image.open(io.BytesIO(data))
    assert grid.size == (3 * 12 + 4, 2 * 12 + 4)
    assert [grid.getpixel(p) for p in [(4, 4), (20, 8), (16, 4), (28, 4), (4, 16), (16, 16)]] == [
        (255, 0, 0), (0, 128, 0), (255, 255, 255), (0, 0, 255), (0, 0, 0), (255, 0, 0)]
    tall = Image.open(io.BytesIO(samples.png_grid([samples.GridImage(png("red"), "a long caption " * 9)])))
    assert tall.size == (4 + 120 + 4, 4 + 120 + 16 + 4), "enlarged until the caption has room"
    with pytest.raises(FlowGrpoError, match="at least one image"):
        samples.png_grid([])


def test_a_grid_gives_back_what_went_into_it():
    noise = np.random.default_rng(0).integers(0, 256, (6, 10, 7, 3), dtype=np.uint8)
    pngs = [samples_png(pixels) for pixels in noise] + [png("green", (4, 4))]
    images = [samples.GridImage(p, f"prompt {i} \u4e2d", 2**63 - 1 - i, {"ocr": i / 3, "a_long_name": -i / 7})
              for i, p in enumerate(pngs)]
    data = samples.png_grid(images)
    found = samples.read_grid(data)
    assert [(i.prompt, i.seed, i.scores) for i in found] == [(i.prompt, i.seed, i.scores) for i in images]
    for ours, theirs in zip(images, found, strict=True):
        assert np.array_equal(Image.open(io.BytesIO(ours.png)), Image.open(io.BytesIO(theirs.png)))
    bare = samples.png_grid([samples.GridImage(i.png, i.prompt) for i in images])
    assert Image.open(io.BytesIO(data)).height > Image.open(io.BytesIO(bare)).height, "scores take lines of their own"
    longest = [samples.GridImage(png("red"), "\U0001f600" * 9000)] * 64
    assert len(samples.read_grid(samples.png_grid(longest))) == 64, "within what PIL reads of a text chunk"
    assert samples.read_grid(png("red")) == []


def samples_png(pixels):
    sink = io.BytesIO()
    Image.fromarray(pixels).save(sink, "PNG")
    return sink.getvalue()
