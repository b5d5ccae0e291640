"""`flowgrpo-ray score`: images of a folder, scored as training scores them."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from pyarrow import csv, parquet
from typer.testing import CliRunner

from flowgrpo_ray import rewards
from flowgrpo_ray.cli import app

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
    assert [row["length"] for row in rows] == [14.0, 14.0, 13.0] and [row["wide"] for row in rows] == [24.0] * 3
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
    ("hopeless", "ValueError: no picture is good enough"), ("leaves", "RewardError: reward leaves called sys.exit(0)"),
])
def test_a_reward_that_fails_everywhere_keeps_its_column(tmp_path, name, error):
    folder, _ = folder_of(tmp_path / "images", ["a.png", "b.png"])
    names = [f"own_rewards:{name}", JPEG, "own_rewards:faulty_everywhere"]
    result = cli(folder, *(part for one in names for part in ("--reward", one)), "--prompt", "x",
                 "--out", tmp_path / "s.parquet", code=1)
    table = parquet.read_table(tmp_path / "s.parquet")
    assert table.column_names == ["path", "prompt", name, JPEG, "faulty_everywhere", "error"]
    assert table.schema.field(name).type == "double" and table[name].null_count == 2 and table[JPEG].null_count == 0
    assert table["error"].to_pylist() == [f"{name}: {error}; faulty_everywhere: IndexError: lost"] * 2
    header, *lines = result.stdout.splitlines()
    assert header.split() == ["image", name, JPEG, "faulty_everywhere"] and lines[0].split()[1] == "-"
    assert f"mean {name}: - of 0 images" in lines and "2 of 2 images have no score" in result.stderr


@pytest.mark.parametrize(("arguments", "message"), [
    (["{folder}", "--reward", "ocrr", "--prompt", "x"], "did you mean ocr"),
    (["{folder}", "--reward", "ocr", "--prompt", "no quotes"], "needs the text to be read in double quotes"),
    (["{folder}", "--reward", JPEG], "which prompts belong to the images?"),
    (["{folder}s", "--reward", JPEG, "--prompt", "x"], "no folder at .*did you mean"),
    (["{folder}", "--reward", JPEG, "--prompt", "x", "--prompt", "y"], "3 images, and there are 2 prompts"),
    (["{folder}", "--reward", JPEG, "--prompt", "x", "--out", "s.parkuet"], "did you mean .parquet"),
    (["{folder}", "--reward", JPEG, "--prompt", "x", "--option", "size=1"], "has no option 'size'"),
    (["{folder}", "--reward", JPEG, "--reward", "ocr", "--prompt", "x", "--option", "mode=full"],
     "of the form reward.key=value"),
])
def test_wrong_input_is_named(tmp_path, arguments, message):
    folder, _ = folder_of(tmp_path / "images", ["a.png", "b.png", "c.png"])
    result = cli(*(argument.format(folder=folder) for argument in arguments), code=2)
    import re

    assert re.search(message, result.stderr.replace("\n", " ")), result.stderr


def test_a_file_that_is_no_image_is_named(tmp_path):
    folder, _ = folder_of(tmp_path / "images", ["a.png"])
    (folder / "b.png").write_bytes(b"no image")
    assert "b.png cannot be read as an image" in cli(folder, "--reward", JPEG, "--prompt", "x", code=2).stderr


def test_pictures_that_would_be_read_wrongly_are_refused(tmp_path):
    folder, images = folder_of(tmp_path / "images", ["a.png"])
    Image.fromarray(images[0][..., 0].astype(np.uint16) * 257).save(folder / "a.png")
    assert "more than 8 bits a channel" in cli(folder, "--reward", JPEG, "--prompt", "x", code=2).stderr
    Image.fromarray(np.zeros((8, 8, 4), np.uint8)).save(folder / "a.png")
    assert "is transparent in places" in cli(folder, "--reward", JPEG, "--prompt", "x", code=2).stderr


def test_scores_of_one_name_are_refused(tmp_path):
    folder, _ = folder_of(tmp_path / "images", ["a.png"])
    result = cli(folder, "--reward", JPEG, "--reward", "own_rewards:clash", "--prompt", "x", code=2)
    assert f"gives a score named '{JPEG}', which another reward has given" in result.stderr
    result = cli(folder, "--reward", "own_rewards:length", "--reward", "scoring_bench:length", "--prompt", "x", code=2)
    assert "would both be named length" in result.stderr
