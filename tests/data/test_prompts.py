import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from flowgrpo_ray.data.prompts import PromptRecord, load_prompts
from flowgrpo_ray.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


def test_text_file_is_a_prompt_a_line(write):
    text = 'New York skyline with "Hello" in fireworks\n\n  two  spaces \r\n\u2028odd\u2028separators\nlast'
    path = write("ocr.txt", text)
    assert load_prompts(path) == [
        PromptRecord('New York skyline with "Hello" in fireworks', line=1), PromptRecord("two  spaces", line=3),
        PromptRecord("odd\u2028separators", line=4), PromptRecord("last", line=5)]


def test_byte_order_mark_is_no_part_of_the_first_prompt(write):
    assert load_prompts(write("a.txt", "\ufeffa cat\n"))[0].prompt == "a cat"


def test_geneval_file_loads_unchanged(write):
    lines = [
        {"tag": "counting", "include": [{"class": "clock", "count": 2}], "prompt": "a photo of two clocks"},
        {"tag": "color_attr", "include": [{"class": "dog", "count": 1, "color": "red"}],
         "exclude": [{"class": "dog", "count": 2}], "prompt": "a photo of a red dog"},
    ]
    records = load_prompts(write("train_metadata.jsonl", "\n".join(map(json.dumps, lines)) + "\n\n"))
    assert [record.prompt for record in records] == [line.pop("prompt") for line in lines]
    assert [record.metadata for record in records] == lines
    assert [record.line for record in records] == [1, 2]


def test_jsonl_keeps_the_known_fields_apart(write):
    row = {"prompt": "a cat", "negative_prompt": "", "seed": 0, "height": 64, "width": 128, "image": "s3://b/cat.png",
           "metadata": {"target": "CAT"}, "split": "easy", "note": None}
    (record,) = load_prompts(write("a.jsonl", json.dumps(row)))
    assert record == PromptRecord("a cat", "", 0, 64, 128, "s3://b/cat.png", {"target": "CAT", "split": "easy"}, 1)
    (record,) = load_prompts(write("b.jsonl", '{"prompt": "a cat", "negative_prompt": null, "seed": null}'))
    assert record == PromptRecord("a cat", line=1)  # null says nothing, an empty negative prompt does


def test_parquet_like_jsonl(tmp_path):
    table = pa.table({
        "prompt": ["a cat", "a dog"], "seed": [None, 3], "height": [64, None], "tag": ["x", "y"],
        "metadata": ['{"target": "CAT"}', None]})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert load_prompts(str(tmp_path / "a.parquet")) == [
        PromptRecord("a cat", height=64, metadata={"target": "CAT", "tag": "x"}, line=1),
        PromptRecord("a dog", seed=3, metadata={"tag": "y"}, line=2)]
    parquet.write_table(table.select(["tag"]).rename_columns(["promt"]), tmp_path / "b.parquet")
    with pytest.raises(ConfigError, match="no column `prompt`; did you mean promt"):
        load_prompts(str(tmp_path / "b.parquet"))


def test_parquet_structs_are_metadata(tmp_path):
    table = pa.table({"prompt": ["a cat"], "metadata": [{"target": "CAT"}]})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert load_prompts(tmp_path / "a.parquet")[0].metadata == {"target": "CAT"}


def test_whole_floats_of_pandas_are_whole_numbers(write, tmp_path):
    """A column of whole numbers with a gap is a column of floats to pandas, and the gap a NaN."""
    columns = {"prompt": ["a", "b"], "seed": [3.0, None], "height": [512.0, None], "width": [64.0, 128.0]}
    expected = [PromptRecord("a", seed=3, height=512, width=64, line=1), PromptRecord("b", width=128, line=2)]
    parquet.write_table(pa.table(columns), tmp_path / "nulls.parquet")
    gaps = {key: [float("nan") if value is None else value for value in values] for key, values in columns.items()}
    parquet.write_table(pa.table(gaps), tmp_path / "nans.parquet")
    rows = [dict(zip(gaps, row, strict=True)) for row in zip(*gaps.values(), strict=True)]
    path = write("a.jsonl", "\n".join(map(json.dumps, rows)))
    for file in (tmp_path / "nulls.parquet", tmp_path / "nans.parquet", path):
        records = load_prompts(file)
        assert records == expected
        assert all(type(value) is int for value in (records[0].seed, records[0].height, records[1].width))


def test_a_whole_surrogate_pair_is_a_character(write):
    assert load_prompts(write("a.jsonl", r'{"prompt": "\ud83d\ude00"}'))[0].prompt == "\U0001f600"


def test_file_uri_and_path_are_the_same(write):
    path = write("a.txt", "a cat\n")
    assert load_prompts("file://" + path) == load_prompts(path)


def test_builtin_files_load():
    records = load_prompts("builtin:tiny/train.txt")
    assert len(records) > 10 and all('"' in record.prompt for record in records)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: unreadable JSON"),
        ("[1]", "line 2: a list; each line holds one JSON object"),
        ('{"promt": "x"}', "line 2: no `prompt`; did you mean promt"),
        ('{"prompt": null}', "line 2: no `prompt`"),
        ('{"prompt": "  "}', "line 2: `prompt` is blank"),
        ('{"prompt": ["x"]}', r"line 2: `prompt` is \['x'\], a list; it must be a text"),
        ('{"prompt": "x", "negative_prompt": 3}', "line 2: `negative_prompt` is 3, a int"),
        ('{"prompt": "x", "image": {}}', "line 2: `image`"),
        ('{"prompt": "x", "seed": -1}', "line 2: `seed` is -1; it must be a whole number of at least 0"),
        ('{"prompt": "x", "seed": true}', "line 2: `seed` is True"),
        ('{"prompt": "x", "height": "512"}', "line 2: `height` is '512'; it must be a whole number of at least 1"),
        ('{"prompt": "x", "width": 0}', "line 2: `width` is 0"),
        ('{"prompt": "x", "height": 512.5}', "line 2: `height` is 512.5"),
        ('{"prompt": "x", "seed": 9223372036854775808}', r"line 2: `seed` is 9\d+; it must be at most 9223372036854775807"),
        ('{"prompt": "x", "seed": 1e300}', "line 2: `seed` is 1000"),
        ('{"prompt": "x", "seed": ' + "1" * 5000 + "}", "line 2: unreadable JSON"),
        (r'{"prompt": "a sign \ud83d"}', r"line 2: `prompt` holds half of a surrogate pair, U\+D83D, which"),
        (r'{"prompt": "x", "negative_prompt": "\udc80"}', r"line 2: `negative_prompt` is not valid UTF-8 \(the byte 0x80\)"),
        (r'{"prompt": "x", "metadata": {"a": ["\udfff"]}}', r"line 2: `metadata` .* U\+DFFF"),
        (r'{"prompt": "x", "tag\udfff": 1}', "line 2: .* half of a surrogate pair"),
        ('{"prompt": "x", "a": ' + "[" * 100_000 + "]" * 100_000 + "}", "line 2: unreadable JSON: it is nested too deeply"),
        ('{"prompt": "x", "metadata": []}', r"line 2: `metadata` is \[\], a list; it must be a mapping"),
        ('{"prompt": "x", "metadata": {"tag": 1}, "tag": 2}', "line 2: 'tag' stands both in"),
    ])
def test_bad_lines_are_named_by_file_and_number(write, line, message):
    path = write("bad.jsonl", '{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=message) as error:
        load_prompts(path)
    assert path in str(error.value)


def test_bytes_that_are_no_text_are_named(write):
    with pytest.raises(ConfigError, match="a.txt, line 2: not UTF-8"):
        load_prompts(write("a.txt", b"a cat\n\xff\xfe\n"))
    with pytest.raises(ConfigError, match="a.parquet: unreadable Parquet"):
        load_prompts(write("a.parquet", b"no parquet"))


def test_files_that_are_not_there_or_hold_nothing(write, tmp_path):
    write("train.txt", "a cat\n")
    with pytest.raises(ConfigError, match="no prompt file at .*trian.txt; did you mean train.txt"):
        load_prompts(str(tmp_path / "trian.txt"))
    with pytest.raises(ConfigError, match="no prompt file at"):
        load_prompts(str(tmp_path / "nowhere" / "train.txt"))
    with pytest.raises(ConfigError, match="is empty"):
        load_prompts(write("empty.txt", "\n \n"))
    with pytest.raises(ConfigError, match="is empty"):
        load_prompts(write("empty.jsonl", ""))
    with pytest.raises(ConfigError, match=r"ends in '.json'; did you mean .jsonl"):
        load_prompts(write("a.json", "{}"))
    with pytest.raises(ConfigError, match="ends in 'no suffix'"):
        load_prompts(write("prompts", "a cat"))
    with pytest.raises(ConfigError, match="zz"):
        load_prompts("zz://bucket/train.txt")
    with pytest.raises(ConfigError, match="did you mean 'builtin:tiny/train.txt'"):
        load_prompts("builtin:train.txt")
    with pytest.raises(ConfigError, match="trian.txt"):
        load_prompts("builtin:tiny/trian.txt")


def test_records_can_be_keys():
    assert len({PromptRecord("a", metadata={"x": 1}), PromptRecord("a", metadata={"x": 1}), PromptRecord("b")}) == 2
