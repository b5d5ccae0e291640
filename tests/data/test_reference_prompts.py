"""The reference implementation's prompt sets."""

import json

from command import cli

from flowgrpo_ray.data.prompts import load_prompts

GENEVAL = {"tag": "colors", "include": [{"class": "bus", "count": 1, "color": "red"}], "prompt": "a photo of a red bus"}


def write_dataset(folder):
    for name in ("ocr", "geneval", "counting_edit", "assets"):
        (folder / name).mkdir(parents=True)
    (folder / "ocr/train.txt").write_text('A sign that says "OPEN"\nno text here\n\nA mug with "TEA"\nA mug with "TEA"\n')
    (folder / "ocr/test.txt").write_text('A mug with "TEA"\n')
    other = GENEVAL | {"prompt": "a photo of two dogs", "include": [{"class": "dog", "count": 2}], "exclude": []}
    (folder / "geneval/train_metadata.jsonl").write_text(json.dumps(GENEVAL) + "\n" + json.dumps(other) + "\n")
    (folder / "geneval/train.txt").write_text("not read, since there are metadata\n")
    edit = {"prompt": "add a cup", "image": "images/1.png", "requirement": "3"}
    (folder / "counting_edit/test_metadata.jsonl").write_text(json.dumps(edit))
    (folder / "assets/a.png").write_bytes(b"")
    return folder


def test_a_dataset_folder_becomes_prompt_files(tmp_path):
    out, dataset = tmp_path / "prompts", write_dataset(tmp_path / "dataset")
    text = cli("prompts", dataset, "--out", out).output
    assert sorted(str(path.relative_to(out)) for path in out.glob("*/*")) == [
        "counting_edit/test.jsonl", "geneval/train.jsonl", "ocr/test.txt", "ocr/train.txt"]
    assert [record.prompt for record in load_prompts(out / "ocr/train.txt")] == [
        'A sign that says "OPEN"', 'A mug with "TEA"', 'A mug with "TEA"']
    assert f"{out}/ocr/train.txt: 3 prompts, 1 of them repeated" in text
    assert "left out: 1 (line 2)" in text and "prompts that are in both files, and so not held out: 1" in text
    assert f"data.train_prompts={out}/ocr/train.txt data.eval_prompts={out}/ocr/test.txt" in text
    colors, two = load_prompts(out / "geneval/train.jsonl")
    assert colors.prompt == "a photo of a red bus"
    assert colors.metadata == {"tag": "colors", "include": GENEVAL["include"]} and two.metadata["exclude"] == []
    (edit,) = load_prompts(out / "counting_edit/test.jsonl")
    assert edit.image == str(dataset / "counting_edit/images/1.png") and edit.metadata == {"requirement": "3"}


def test_one_set_alone(tmp_path):
    write_dataset(tmp_path / "dataset")
    cli("prompts", tmp_path / "dataset/geneval", "--out", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out/geneval").iterdir()] == ["train.jsonl"]
    before = (tmp_path / "dataset/ocr/train.txt").read_text()
    assert "holds the sets themselves" in cli("prompts", tmp_path / "dataset", "--out", tmp_path / "dataset", code=2).stderr
    assert (tmp_path / "dataset/ocr/train.txt").read_text() == before


def test_wrong_folders_and_files(tmp_path):
    error = cli("prompts", tmp_path, "--out", tmp_path / "out", code=2).stderr
    assert "no prompt set in" in error and "git clone https://github.com/yifan123/flow_grpo" in error
    (tmp_path / "ocr").mkdir()
    (tmp_path / "ocr/train.txt").write_text("nothing quoted\n")
    assert "no prompt of it can be used" in cli("prompts", tmp_path, code=2).stderr
    (tmp_path / "geneval").mkdir()
    (tmp_path / "geneval/test_metadata.jsonl").write_text("{}\n")
    assert "test_metadata.jsonl, line 1: no `prompt`" in cli("prompts", tmp_path / "geneval", code=2).stderr
