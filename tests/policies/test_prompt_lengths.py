"""What the text encoders read of a prompt, measured on the encodings themselves, and what a run says of it."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from flowgrpo_ray.config.schema import ModelConfig
from flowgrpo_ray.data.prompts import PromptRecord
from flowgrpo_ray.errors import ConfigError
from flowgrpo_ray.policies.prompt_lengths import ranges
from flowgrpo_ray.policies.source import find
from flowgrpo_ray.policies.text import PromptReader, TextEncoder
from flowgrpo_ray.preflight import check

TEXT = "the old man and the sea, a red boat by night"


@pytest.mark.parametrize(("kind", "options", "limits"), [
    ("sd3_no_t5", {}, (16, 16)),
    ("sd3_t5", {"max_sequence_length": 12}, (16, 16, 12)),  # CLIP reads more
    ("sd3_t5", {"max_sequence_length": 24}, (16, 16, 24)),  # T5 does
    ("sd3_t5", {"max_sequence_length": 24, "use_t5": False}, (16, 16)),
    ("flux_dev", {"max_sequence_length": 24}, (16, 24)),
])
def test_a_prompt_ends_for_the_reader_where_it_does_for_the_encoders(folders, fresh, kind, options, limits):
    model = ModelConfig(path=folders(kind), **options)
    reader, policy = PromptReader(find(model), model), fresh(kind, **options)
    assert reader.limits == limits
    (seen,) = reader.read([TEXT])
    assert 0 < seen.end < len(TEXT)

    def encoded(text: str) -> bytes:
        return b"".join(array.tobytes() for _, array in sorted(policy.encode([PromptRecord(text)]).items()))

    assert encoded(TEXT[:seen.end] + "xyz") == encoded(TEXT)
    assert encoded(TEXT[:seen.end - 1] + "%" + TEXT[seen.end:]) != encoded(TEXT)
    same, other = reader.read([TEXT[:seen.end] + "xyz", "x" + TEXT])
    assert same.tokens == seen.tokens != other.tokens


def test_a_prompt_that_fits_exactly_is_not_cut(folders):
    model = ModelConfig(path=folders("sd3_no_t5"))
    reader = PromptReader(find(model), model)
    assert [seen.end for seen in reader.read(["a" * 14, "a" * 15, "é" * 3])] == [None, 14, None]


def test_no_tokenizer_is_loaded_for_short_prompts(folders, monkeypatch):
    monkeypatch.setattr("flowgrpo_ray.policies.text._load", lambda *args: pytest.fail("a tokenizer is loaded"))
    for kind, length in (("sd3_no_t5", 13), ("sd3_t5", 253), ("flux_dev", 509)):
        model = ModelConfig(path=folders(kind))
        assert [seen.end for seen in PromptReader(find(model), model).read(["a" * length])] == [None]


def test_a_tokenizer_that_cannot_be_loaded_is_named(tmp_path, folders):
    model = ModelConfig(path=folders("sd3_no_t5"))
    source = find(model)
    source.index["tokenizer"] = ["transformers", "NoTokenizer"]
    with pytest.raises(ConfigError, match="its tokenizer cannot be loaded: AttributeError"):
        PromptReader(source, model).read(["a" * 20])


def test_encoders_of_a_family_are_those_of_its_pipeline(folders, fresh):
    for kind in ("sd3_t5", "flux_dev"):
        model, policy = ModelConfig(path=folders(kind)), fresh(kind)
        encoders = PromptReader(find(model), model).encoders
        names = {name for name in policy.pipeline.components if name.startswith("tokenizer")}
        assert {encoder.tokenizer for encoder in encoders} == names and isinstance(encoders[0], TextEncoder)


# In a run -------------------------------------------------------------------------------------------------------------

@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(prompts, reward, **overrides): checks a run of the tiny model, which reads 16 letters of a prompt."""
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[1] / "support"), *sys.path])
    from runs import small_config

    def checked(prompts: list[str], reward: str = "jpeg_compressibility", **overrides):
        file = tmp_path / "prompts.txt"
        file.write_text("\n".join(prompts) + "\n", encoding="utf-8")
        rewards = {"rewards": {reward: {}}, "pools.reward": {}}
        return check(small_config(tmp_path, "x", overrides={
            **rewards, "data.train_prompts": str(file), "data.eval_prompts": None,
            **{f"data.{key}": value for key, value in overrides.items()}}))

    return checked


PROMPTS = ["a cat", "the old man and the sea", "a boat by night and day", "the old man and the sun", "the oldman and the s"]


def test_cut_prompts_are_counted_and_listed(run, caplog):
    with caplog.at_level(logging.WARNING):
        run(PROMPTS)
    (record,) = caplog.records
    text = record.getMessage()
    assert "does not read the end of 3 of 5 prompts" in text and "prompts.txt" in text
    assert "CLIP reads 18 tokens, the second CLIP 18" in text and "max_sequence_length" not in text
    assert "  line 2: ...'the old man and the s' is read, 'ea'... is not" in text
    assert "lines 2, 4 are one prompt to the model" in text


def test_cut_prompts_can_be_an_error(run, caplog):
    with pytest.raises(ConfigError, match="end of 3 of 5 prompts(.|\n)*set data.on_long_prompt: warn"):
        run(PROMPTS, on_long_prompt="error")
    run(PROMPTS[:1], on_long_prompt="error")
    assert not caplog.records


def test_a_text_that_ocr_looks_for_must_be_read(run, caplog):
    far = ['the word "CAT"', 'a very large sign of wood "CAT"', 'one "CAT" by the old sea side', 'the letters "ABCDEFGH"']
    with pytest.raises(ConfigError) as error:
        run(far, "ocr")
    assert "the text that reward ocr looks for is cut off in 2 of 4 prompts" in str(error.value)
    assert "lines 2, 4; shorten these prompts" in str(error.value)
    run([far[0], far[2]], "ocr")  # what follows the quoted text may be cut
    assert "end of 1 of 2 prompts" in caplog.text


def test_a_text_that_cannot_be_read_names_its_line(run):
    with pytest.raises(ConfigError) as error:
        run(['the word "CAT"', 'the word "\u00a0"', 'the word "СОБ"'], "ocr")
    assert "2 of 3 prompts" in str(error.value)
    assert "line 2: 'the word \"\\xa0\"': ocr has nothing to compare" in str(error.value)
    assert "line 3: " in str(error.value) and "U+0421 CYRILLIC CAPITAL LETTER ES" in str(error.value)
    assert "lang: ru" in str(error.value)


def test_ranges():
    assert ranges([3, 7, 8, 9, 12, 13]) == "3, 7-9, 12-13" and ranges([1]) == "1"
