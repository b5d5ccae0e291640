import re

import pytest

from flowgrpo_ray import tiny
from flowgrpo_ray.errors import ConfigError
from flowgrpo_ray.tiny.build_model import read_words
from flowgrpo_ray.tiny.drawing import LONGEST, prompt_of

NAMES = ["heldout.txt", "heldout_long.txt", "train.txt"]


def test_names():
    assert tiny.prompt_files() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_line_is_a_prompt_with_a_quoted_word(name):
    lines = tiny.prompt_file(name).read_text().splitlines()
    assert len(set(lines)) == len(lines)
    for line in lines:
        assert re.fullmatch(r'the word "[A-Z]+"', line)
        word = line.split('"')[1]
        assert 2 <= len(word) <= LONGEST
        assert line == prompt_of(word)


def test_held_out_words_are_not_trained_on():
    train, held_out, long = (set(read_words(name)) for name in ("train.txt", "heldout.txt", "heldout_long.txt"))
    assert len(train) >= 200 and len(held_out) >= 40 and len(long) >= 200
    assert not train & long
    assert held_out < long


@pytest.mark.parametrize(("wrong", "right"), [("heldot.txt", "heldout.txt"), ("train", "train.txt")])
def test_unknown_file_names_the_nearest(wrong, right):
    with pytest.raises(ConfigError, match=f"'{re.escape(wrong)}'.*did you mean {re.escape(right)}"):
        tiny.prompt_file(wrong)


def test_a_path_is_no_name():
    with pytest.raises(ConfigError):
        tiny.prompt_file("../model/model_index.json")


def test_missing_model_says_how_to_make_it(monkeypatch, tmp_path):
    monkeypatch.setattr(tiny, "_HERE", tmp_path)
    with pytest.raises(ConfigError, match="flowgrpo_ray.tiny.build_model"):
        tiny.model_dir()
