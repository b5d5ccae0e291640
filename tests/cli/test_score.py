"""`flowgrpo-ray score`: images of a folder, scored as training scores them."""

from __future__ import annotations

import gc
import itertools
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pyarrow import csv, parquet
from raw_png import PALETTE, RGB, png
from typer.testing import CliRunner

from flowgrpo_ray import rewards
from flowgrpo_ray.cli import score as score_module
from flowgrpo_ray.cli.main import app
from flowgrpo_ray.cli.score import read_image
from flowgrpo_ray.rewards.base import read_only
from flowgrpo_ray.rewards.http_client import to_png

JPEG = "jpeg_compressibility"


def cli(*args, code=0):
    result = CliRunner().invoke(app, ["score", *map(str, args)], prog_name="flowgrpo-ray")
    assert result.exit_code == code, (result.output, result.exception)
    return result


def folder_of(path, names, size=(16, 24)):
    path.mkdir()
    images = np.random.default_rng(0).integers(0, 256, (len(names), *size, 3), np.uint8)
    for name, image in zip(names, images, strict=True):
        Image.fromarray(image).save(path / name)
    return path, images


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text('the word "ABC"\nthe word "DE"\n')
    return file


def test_scores_are_those_of_the_reward(tmp_path, prompts):
    folder, images = folder_of(tmp_path / "images", ["00_00.png", "00_01.png", "01_00.png", "grid.png"])
    table = tmp_path / "out" / "scores.parquet"
    result = cli(folder, "--reward", JPEG, "--reward", "own_rewards:length", "--prompts", prompts, "--out", table)
    rows = parquet.read_table(table).to_pylist()
    assert [row["path"].rpartition("/")[2] for row in rows] == ["00_00.png", "00_01.png", "01_00.png"], "the grid is no sample"
    expected = rewards.get(JPEG).score(images[:3], [""] * 3, [{}] * 3)[JPEG]
    assert [row[JPEG] for row in rows] == [float(value) for value in expected]
    assert [row["length"] for row in rows] == [14.0, 14.0, 13.0] and [row["length_wide"] for row in rows] == [24.0] * 3
    assert [row["error"] for row in rows] == [None] * 3
    assert f"mean {JPEG}: {expected.mean():.4f} of 3 images" in result.stdout


def test_groups_sizes_and_tables(tmp_path, prompts):
    folder, images = folder_of(tmp_path / "images", ["0_0.png", "0_1.png", "1_0.png", "1_1.png"])
    Image.fromarray(images[0][:8]).resize((50, 40)).save(folder / "0_0.png")
    Image.fromarray(images[1]).resize((50, 40)).save(folder / "0_1.png")
    cli(folder, "--reward", "own_rewards:rank_in_group", "--prompts", prompts, "--out", tmp_path / "s.csv")
    scores = csv.read_csv(tmp_path / "s.csv")["rank_in_group"].to_pylist()
    assert sorted(scores[:2]) == [0, 1] and sorted(scores[2:]) == [0, 1]


def test_an_image_that_fails_has_no_score_and_the_others_do(tmp_path):
    folder, images = folder_of(tmp_path / "images", ["a.png", "b.png", "c.png"])
    import own_rewards

    images[1, 0, 0] = own_rewards.VICTIM
    Image.fromarray(images[1]).save(folder / "b.png")
    result = cli(folder, "--reward", "own_rewards:faulty", "--prompt", "anything", "--out", tmp_path / "s.jsonl", code=1)
    assert "1 of 3 images have no score" in result.stderr and "ValueError: this image is beyond me" in result.stdout
    import json

    rows = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert [row["faulty"] is None for row in rows] == [False, True, False]


@pytest.mark.parametrize(("name", "error"), [
    ("hopeless", "ValueError: no image is good enough"), ("leaves", "RewardError: reward leaves called sys.exit(0)"),
])
def test_a_reward_that_fails_everywhere_keeps_its_column(tmp_path, name, error):
    folder, _ = folder_of(tmp_path / "images", ["a.png", "b.png"])
    names = [f"own_rewards:{name}", JPEG, "own_rewards:faulty_everywhere"]
    result = cli(folder, *(part for one in names for part in ("--reward", one)), "--prompt", "x",
                 "--out", tmp_path / "s.parquet", code=1)
    table = parquet.read_table(tmp_path / "s.parquet")
    assert table.column_names == ["path", "prompt", name, JPEG, "faulty_everywhere", "error"]
    assert table.schema.field(name).type == "double" and table[name].null_count == 2 and table[JPEG].null_count == 0
    reported = [re.sub(r" \([^()]+own_rewards\.py, line \d+\)", " (PLACE)", text) for text in table["error"].to_pylist()]
    place = "" if error.startswith("RewardError") else " (PLACE)"
    assert reported == [f"{name}: {error}{place}; faulty_everywhere: IndexError: lost (PLACE)"] * 2
    header, *lines = result.stdout.splitlines()
    assert header.split() == ["image", name, JPEG, "faulty_everywhere"] and lines[0].split()[1] == "-"
    assert f"mean {name}: - of 0 images" in lines and "2 of 2 images have no score" in result.stderr


@pytest.mark.parametrize(("arguments", "message"), [
    (["{folder}", "--reward", "ocrr", "--prompt", "x"], "did you mean ocr"),
    (["{folder}", "--reward", "ocr", "--prompt", "no quotes"], "needs the text to be read in double quotes"),
    (["{folder}", "--reward", "video_ocr", "--prompt", 'the word "A"'],
     "reward video_ocr scores videos; this command takes images; did you mean ocr"),
    (["{folder}", "--reward", JPEG], "which prompts belong to the images?"),
    (["{folder}s", "--reward", JPEG, "--prompt", "x"], "no folder at .*did you mean"),
    (["{folder}", "--reward", JPEG, "--prompt", "x", "--prompt", "y"], "3 images for 2 prompts"),
    (["{folder}", "--reward", JPEG, "--prompt", "x", "--out", "s.parkuet"], "did you mean .parquet"),
    (["{folder}", "--reward", JPEG, "--prompt", "x", "--option", "size=1"], "has no option 'size'"),
    (["{folder}", "--reward", JPEG, "--reward", "ocr", "--prompt", "x", "--option", "mode=full"],
     "of the form reward.key=value"),
    (["{folder}", "--reward", "ocr", "--prompt", "x", "--option", "mode"],
     "--option 'mode' is not of the form key=value, for example mode=recognition$"),
    (["{folder}", "--reward", JPEG, "--reward", "ocr", "--prompt", "x", "--option", "mode"],
     "--option 'mode' is not of the form reward.key=value, for example ocr.mode=recognition$"),
    (["{folder}", "--reward", "ocr", "--prompt", "x", "--option", "mode=["],
     "--option 'mode=\\[': the value is not valid YAML"),
])
def test_wrong_input_is_named(tmp_path, arguments, message):
    folder, _ = folder_of(tmp_path / "images", ["a.png", "b.png", "c.png"])
    result = cli(*(argument.format(folder=folder) for argument in arguments), code=2)
    assert re.search(message, result.stderr.strip().replace("\n", " ")), result.stderr


def test_a_file_that_is_no_image_is_named(tmp_path):
    folder, _ = folder_of(tmp_path / "images", ["a.png"])
    (folder / "b.png").write_bytes(b"no image")
    assert "b.png cannot be read as an image" in cli(folder, "--reward", JPEG, "--prompt", "x", code=2).stderr


def test_images_that_would_be_read_wrongly_are_refused(tmp_path):
    folder, images = folder_of(tmp_path / "images", ["a.png"])
    Image.fromarray(images[0][..., 0].astype(np.uint16) * 257).save(folder / "a.png")
    assert "more than 8 bits a channel" in cli(folder, "--reward", JPEG, "--prompt", "x", code=2).stderr
    Image.fromarray(np.zeros((8, 8, 4), np.uint8)).save(folder / "a.png")
    assert "is transparent in places" in cli(folder, "--reward", JPEG, "--prompt", "x", code=2).stderr


def test_scores_of_one_name_are_refused(tmp_path):
    folder, _ = folder_of(tmp_path / "images", ["a.png"])
    result = cli(folder, "--reward", JPEG, "--reward", "own_rewards:jpeg", "--prompt", "x", code=2)
    assert f"gives a score named '{JPEG}', which another reward has given" in result.stderr
    result = cli(folder, "--reward", "own_rewards:length", "--reward", "scoring_bench:length", "--prompt", "x", code=2)
    assert "would both be named length" in result.stderr


def test_what_a_reward_notes_is_told_once(tmp_path):
    folder, _ = folder_of(tmp_path / "images", [f"{i}.png" for i in range(20)])
    result = cli(folder, "--reward", "own_rewards:Noting", "--prompt", "x")
    assert result.stderr == "Noting: it does without colours\n"


OWN = """
import weakref
from pathlib import Path
import numpy as np
from flowgrpo_ray.rewards import Reward

def error(images, prompts, metadata): return [1.0] * len(images)
def bs(images, prompts, metadata, *, batch_size=None):
    return {"bs": [1.0] * len(images), "together": [float(len(images))] * len(images)}
def fails(images, prompts, metadata): raise IndexError("lost")
def monitor_fails(images, prompts, metadata): raise IndexError("lost")
def monitor(images, prompts, metadata): return {"monitor": [1.0] * len(images), "fails": [2.0] * len(images)}
class Mute(Exception):
    def __str__(self): raise KeyError("no words")
def mute(images, prompts, metadata): raise Mute
def leaks(images, prompts, metadata): raise ValueError("odd \\udcff byte")
class never(Reward):
    name, range, description = "never", (0, 9), "never"
    def __init__(self, **options):
        super().__init__(**options)
        raise SystemError("loaded")
    def score(self, *rest, **more): raise SystemError("scored")
class Two(Reward):
    name, range, description = "two", (0, 9), "two"
    def score(self, images, prompts, metadata, *, group_ids=None):
        return {key: np.ones(len(images), np.float32) for key in ("two", "two_same", "same")}
class Film(Reward):
    name, range, description, video = "film", (0, 9), "film", True
    def __init__(self, **options):
        super().__init__(**options)
        raise SystemError("loaded")
    def score(self, *rest, **more): raise SystemError("scored")
alive = weakref.WeakSet()
class Heavy(Reward):
    name, range, description = "heavy", (0, 9), "heavy"
    def __init__(self, **options):
        super().__init__(**options)
        if alive: raise SystemError("the one before it is still there")
        alive.add(self)
        self.itself = self
    def score(self, images, prompts, metadata, *, group_ids=None):
        return {self.name: np.ones(len(images), np.float32)}
class Heavier(Heavy):
    name = "heavier"
def removes(images, prompts, metadata, *, file=""):
    Path(file).unlink(missing_ok=True)
    return [1.0] * len(images)
class Zero(Reward):
    name, range, description, batch_size = "zero", (0, 9), "zero", 0
    def score(self, images, prompts, metadata, *, group_ids=None):
        return {"zero": np.ones(len(images), np.float32)}
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A package of your own, with a module in a dotted place."""
    import sys

    (tmp_path / "lib" / "pk_score" / "sub").mkdir(parents=True)
    (tmp_path / "lib" / "pk_score" / "sub" / "m.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path / "lib")
    yield "pk_score.sub.m"
    for name in [name for name in sys.modules if name.startswith("pk_score")]:
        del sys.modules[name]


@pytest.mark.parametrize(("names", "options", "message"), [
    (["error"], [], "gives a score named 'error', which is a column of the table; .*another name"),
    (["monitor_fails", "monitor"], [], "gives a score named 'monitor_fails', which another reward has given"),
    (["monitor", "monitor_fails"], [], "gives a score named 'monitor_fails', which another reward has given"),
    (["Two"], [], "gives two scores that would both be named 'Two_same'"),
    (["bs", "bs"], [], "--reward pk_score.sub.m:bs is there twice"),
    (["fails", "bs"], ["pk_score.sub.n:bs.batch_size=2"], "of the form reward.key=value"),
    *[(["never", "bs"], [f"pk_score.sub.m:bs.batch_size={value}"],
       f"reward bs: option batch_size is {shown}, not a whole number of images")
      for value, shown in [("-3", "-3"), ("0", "0"), ("0.5", "0.5"), ("all", "'all'"), ("true", "True")]],
    (["Zero"], [], "batch_size is 0, not a whole number of images"),
    (["never", "Film"], [], "reward film scores videos; this command takes images; the choices are ocr, jpeg_compressibility"),
])
def test_a_reward_that_cannot_be_scored_well_is_refused(tmp_path, own, names, options, message):
    folder, _ = folder_of(tmp_path / "images", ["a.png", "b.png"])
    arguments = [part for name in names for part in ("--reward", f"{own}:{name}")]
    arguments += [part for option in options for part in ("--option", option)]
    result = cli(folder, *arguments, "--prompt", "x", "--out", tmp_path / "s.csv", code=2)
    assert re.search(message, result.stderr.replace("\n", " ")), result.stderr
    assert not (tmp_path / "s.csv").exists()


def test_an_option_goes_to_a_reward_of_a_dotted_module(tmp_path, own):
    folder, _ = folder_of(tmp_path / "images", ["a.png", "b.png", "c.png"])
    for others in [["--reward", JPEG], []]:
        cli(folder, *others, "--reward", f"{own}:bs", "--option", f"{own}:bs.batch_size=2", "--prompt", "x",
            "--out", tmp_path / "s.csv")
        assert csv.read_csv(tmp_path / "s.csv")["bs_together"].to_pylist() == [2, 2, 1]


def test_unprintable_error_fails_only_its_image(tmp_path, own):
    folder, _ = folder_of(tmp_path / "images", ["a.png"])
    cli(folder, *(f"--reward={name}" for name in (f"{own}:mute", f"{own}:leaks", JPEG)), "--prompt", "x",
        "--out", tmp_path / "s.parquet", code=1)
    row, = parquet.read_table(tmp_path / "s.parquet").to_pylist()
    assert row[JPEG] is not None and row["mute"] is None
    place = r" \([^()]+\.py, line \d+\)"
    assert re.fullmatch(
        rf"mute: Mute: its message cannot be read \(KeyError\){place}; leaks: ValueError: odd \\udcff byte{place}",
        row["error"])


def test_a_group_of_several_sizes_is_refused(tmp_path, prompts, own):
    folder, images = folder_of(tmp_path / "images", ["0_0.png", "0_1.png", "1_0.png", "1_1.png"])
    Image.fromarray(images[0]).resize((50, 40)).save(folder / "1_1.png")
    result = cli(folder, f"--reward={own}:never", "--reward=own_rewards:rank_in_group", "--prompts", prompts, code=2)
    error = " ".join(result.stderr.split())
    assert "reward rank_in_group scores a group in one call, and the images of prompt" in error and '"DE"' in error
    assert "1_0.png is 24 x 16 and 1_1.png is 50 x 40" in error


@pytest.mark.parametrize("place", ["folder.csv", "file/s.csv", "file/deeper/s.csv", "n" * 300 + ".csv"])
def test_a_table_that_cannot_be_written_is_found_before_scoring(tmp_path, own, place):
    folder, _ = folder_of(tmp_path / "images", ["a.png"])
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "file").touch()
    result = cli(folder, "--reward", f"{own}:never", "--prompt", "x", "--out", tmp_path / place, code=2)
    assert "cannot be written" in result.stderr and not result.stdout, result.output


def test_a_table_of_before_stays_until_it_is_replaced(tmp_path, own):
    folder, _ = folder_of(tmp_path / "images", ["a.png"])
    (tmp_path / "s.csv").write_text("before")
    cli(folder, "--reward", f"{own}:error", "--prompt", "x", "--out", tmp_path / "s.csv", code=2)
    assert (tmp_path / "s.csv").read_text() == "before"


def test_images_of_other_kinds_are_named(tmp_path):
    folder, images = folder_of(tmp_path / "images", ["a.png", "b.gif", "c.TIF", "d.tiff"])
    assert "not read: b.gif, c.TIF, d.tiff" in cli(folder, "--reward", JPEG, "--prompt", "x").stderr
    (folder / "a.png").unlink()
    assert "not read: b.gif" in " ".join(cli(folder, "--reward", JPEG, "--prompt", "x", code=2).stderr.split())


@pytest.mark.parametrize(("data", "message"), [
    (b"no image", "b.png cannot be read as an image"),
    (to_png(np.random.default_rng(0).integers(0, 256, (9, 9, 3), np.uint8))[:-40], "b.png cannot be read as an image"),
    (png(RGB, 8, [b"abc"], (b"pHYs", b"\0"), width=1), "b.png cannot be read as an image: Truncated pHYs chunk"),
    (png(RGB, 8, [b"abc"], (b"tRNS", b"\0a\0b\0c"), width=1), "b.png is transparent in places"),
    (png(PALETTE, 1, [b"\0"], (b"PLTE", b"abc"), (b"tRNS", b"\0"), width=1), "b.png is transparent in places"),
    (png(RGB, 16, [b"abcdef"], width=1), "b.png has more than 8 bits a channel"),
], ids=itertools.count())
@pytest.mark.parametrize("grouped", [False, True])
def test_every_image_is_read_before_a_reward_is_loaded(tmp_path, own, data, message, grouped):
    folder, _ = folder_of(tmp_path / "images", ["a.png"])
    (folder / "b.png").write_bytes(data)
    names = ["--reward", f"{own}:never", *(["--reward", "own_rewards:rank_in_group"] if grouped else [])]
    result = cli(folder, *names, "--prompt", "x", "--prompt", "y", code=2)
    assert message in result.stderr and not result.stdout


def test_what_only_a_whole_group_needs_is_read_before_a_reward_is_loaded(tmp_path, own, monkeypatch):
    folder, _ = folder_of(tmp_path / "images", ["a.png"])
    (folder / "b.png").write_bytes(b"no image")
    monkeypatch.setattr(rewards, "get", lambda *_, **__: pytest.fail("loaded"))
    result = cli(folder, "--reward", "own_rewards:rank_in_group", "--prompt", "x", "--prompt", "y", code=2)
    assert "b.png cannot be read as an image" in result.stderr


@pytest.mark.parametrize("function", ["bs", "rank_in_group"])
def test_no_more_images_are_held_than_one_call_takes(tmp_path, own, monkeypatch, function):
    held, most = [], []

    def noted(array):
        held.append(weakref.ref(array))
        most[-1] = max(most[-1], sum(len(kept) if kept.ndim == 4 else 1 for ref in held if (kept := ref()) is not None))
        return array

    monkeypatch.setattr(score_module, "read_image", lambda path: noted(read_image(path)))
    monkeypatch.setattr(score_module, "read_only", lambda images: read_only(noted(images)))
    for groups in (1, 5):
        names = [f"{group}_{number}.png" for group in range(groups) for number in range(3)]
        folder, _ = folder_of(tmp_path / f"images{groups}", names)
        most.append(0)
        name = f"{own if function == 'bs' else 'own_rewards'}:{function}"
        options = ["--option", f"{name}.batch_size=3"] if function == "bs" else []
        cli(folder, "--reward", name, *options, *(part for _ in range(groups) for part in ("--prompt", "x")))
    assert most == [3, 3]


def test_a_reward_is_gone_before_the_next_is_loaded(tmp_path, own):
    folder, _ = folder_of(tmp_path / "images", ["a.png", "b.png"])
    gc.disable()  # nothing goes by chance
    try:
        cli(folder, "--reward", f"{own}:Heavy", "--reward", f"{own}:Heavier", "--prompt", "x")
    finally:
        gc.enable()


def test_an_image_that_is_gone_when_it_is_to_be_scored_has_no_score(tmp_path, own):
    folder, _ = folder_of(tmp_path / "images", ["a.png", "b.png"])
    name = f"{own}:removes"
    cli(folder, "--reward", name, "--reward", JPEG, "--option", f"{name}.file={folder / 'b.png'}", "--prompt", "x",
        "--out", tmp_path / "s.parquet", code=1)
    first, second = parquet.read_table(tmp_path / "s.parquet").to_pylist()
    assert first[JPEG] is not None and first["error"] is None
    assert second[JPEG] is None and "b.png cannot be read as an image: " in second["error"] and second["removes"] == 1


@pytest.mark.parametrize("function", ["in_place", "unlocks"])
def test_a_reward_gets_read_only_images_as_in_a_run(tmp_path, function):
    folder, _ = folder_of(tmp_path / "images", ["a.png", "b.png"])
    result = cli(folder, "--reward", f"own_rewards:{function}", "--no-self-test", "--prompt", "x", code=1)
    assert len(re.findall("ValueError: .*(?:read-only|cannot set WRITEABLE)", result.stdout)) == 2, result.stdout


@pytest.mark.parametrize(("command", "where"), [("score", "init"), ("score", "self_test"), ("serve-reward", "init"),
                                                ("serve-reward", "self_test")])
def test_a_reward_that_breaks_before_scoring_is_an_error_of_one_line(tmp_path, command, where):
    folder, _ = folder_of(tmp_path / "images", ["a.png"])
    own = "own_rewards:Breaking"
    arguments = [folder, "--reward", own, "--prompt", "x"] if command == "score" else [own, "--port", 0]
    result = CliRunner().invoke(app, [command, *map(str, arguments), "--option", f"where={where}"])
    assert result.exit_code == 1
    assert re.fullmatch(r"error: reward .* fails: \w+Error: .* \(\S*own_rewards.py, line \d+\)\n", result.stderr), result.stderr


@pytest.mark.parametrize(("scores", "code"), [("leaves_a_thread", 0), ("hopeless", 1)])
def test_threads_that_a_reward_leaves_do_not_keep_the_command(tmp_path, scores, code):
    folder, _ = folder_of(tmp_path / "images", ["a.png"])
    names = dict.fromkeys(["leaves_a_thread", scores])
    support = str(Path(__file__).parents[1] / "support")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([support, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-m", "flowgrpo_ray.cli", "score", str(folder), "--prompt", "x", "--out", str(tmp_path / "s.csv"),
         *(part for name in names for part in ("--reward", f"own_rewards:{name}")),
         "--option", f"own_rewards:leaves_a_thread.path={tmp_path / 'end'}"],
        capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == code, done.stderr
    assert "mean leaves_a_thread: " in done.stdout and str(tmp_path / "s.csv") in done.stdout
    assert csv.read_csv(tmp_path / "s.csv")["leaves_a_thread"].to_pylist() != [None]
    assert (tmp_path / "end").read_text() == "ended"
