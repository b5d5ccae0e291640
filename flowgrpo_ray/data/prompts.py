"""Prompt files: .txt (a prompt a line), .jsonl and .parquet, on the local disk or any pyarrow.fs URI (s3://, gs://).

The known fields are `prompt`, `negative_prompt`, `seed`, `height`, `width`, `image` and `metadata`; every other key or
column becomes metadata, so the OCR and GenEval prompt files of the reference implementation load as they are.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pyarrow import ArrowException, parquet

from flowgrpo_ray import storage
from flowgrpo_ray.errors import ConfigError, nearest

SUFFIXES = (".txt", ".jsonl", ".parquet")
LARGEST_INTEGER = 2**63 - 1  # what the sample table, Parquet's int64, can hold
FIELDS = ("prompt", "negative_prompt", "seed", "height", "width", "image", "metadata")


@dataclass(frozen=True)
class PromptRecord:
    """One prompt of a file. None means that the file leaves the choice to the configuration.

    `height` and `width` are in pixels, `image` is the path or URI of a condition image, `line` is the 1-based line of
    the file (the 1-based row of a Parquet file).
    """

    prompt: str
    negative_prompt: str | None = None
    seed: int | None = None
    height: int | None = None
    width: int | None = None
    image: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict, hash=False)
    line: int = 0

    @property
    def reward_metadata(self) -> dict[str, Any]:
        """What a reward is told beside the prompt: the metadata, and the condition image as "image"."""
        return dict(self.metadata) | ({"image": self.image} if self.image else {})


def load_prompts(uri: str | os.PathLike[str]) -> list[PromptRecord]:
    """Read a prompt file; records keep the order of the file, blank lines are left out.

    Args:
        uri: path, file://, s3:// or gs:// URI of a .txt, .jsonl or .parquet file, or `builtin:tiny/NAME`.

    Raises:
        ConfigError: no such file, unknown suffix, no prompt in it, or a bad line; names the file and the line.
    """
    uri = os.fspath(uri)
    location, uri = location_of(uri), storage.display(uri)
    suffix = os.path.splitext(storage.base_name(location))[1].lower()
    if suffix not in SUFFIXES:
        raise ConfigError(f"prompt file {uri} ends in {suffix or 'no suffix'!r}{nearest(suffix, SUFFIXES)}")
    data = _read(location)
    if suffix == ".parquet":
        records = [_record(row, uri, number) for number, row in _parquet_rows(data, uri)]
    elif suffix == ".jsonl":
        records = [_record(_json_object(text, uri, number), uri, number) for number, text in _lines(data, uri)]
    else:
        records = [PromptRecord(prompt=text, line=number) for number, text in _lines(data, uri)]
    if not records:
        raise ConfigError(f"prompt file {uri} is empty: it needs at least one prompt")
    return records


def location_of(uri: str) -> str:
    """The path or URI to read: built-in names are looked up."""
    if not uri.startswith("builtin:"):
        return uri
    package, _, name = uri.removeprefix("builtin:").partition("/")
    if package != "tiny" or not name:
        raise ConfigError(f"no built-in prompt file is named {uri!r}; did you mean 'builtin:tiny/train.txt'?")
    from flowgrpo_ray.tiny import prompt_file  # imported here: only runs of the demo need it

    return str(prompt_file(name))


def _read(uri: str) -> bytes:
    try:
        if storage.size(uri) is None:
            names = [name for name in storage.list_dir(storage.parent(uri)) if name.endswith(SUFFIXES)]
            raise ConfigError(f"no prompt file at {storage.display(uri)}{nearest(storage.base_name(uri), names)}")
        return storage.read_bytes(uri)
    except (OSError, ArrowException) as error:
        raise ConfigError(f"cannot read prompt file {storage.display(uri)}: {error}") from None


def _lines(data: bytes, uri: str) -> Iterator[tuple[int, str]]:
    """(1-based number, stripped text) of the lines that are not blank. Only \\n ends a line, as editors count them."""
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            text = raw.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{uri}, line {number}: not UTF-8 ({error})") from None
        if text:
            yield number, text


def _json_object(text: str, uri: str, number: int) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except ValueError as error:  # also for a number of thousands of digits
        raise ConfigError(f"{uri}, line {number}: unreadable JSON: {error}") from None
    except RecursionError:
        raise ConfigError(f"{uri}, line {number}: unreadable JSON: it is nested too deeply") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{uri}, line {number}: a {type(row).__name__}; each line holds one JSON object, for example "
                          '{"prompt": "a cat"}')
    return row


def _parquet_rows(data: bytes, uri: str) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        table = parquet.read_table(io.BytesIO(data))
        rows = table.to_pylist()
    except (ArrowException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{uri}: unreadable Parquet: {error}") from None
    if "prompt" not in table.column_names:
        raise ConfigError(f"{uri}: no column `prompt`{nearest('prompt', table.column_names)}")
    for number, row in enumerate(rows, start=1):
        if isinstance(row.get("metadata"), str):  # Parquet has no free-form mapping: a JSON text stands for one
            row["metadata"] = _json_object(row["metadata"], uri, number)
        yield number, row


def _record(row: dict[str, Any], uri: str, number: int) -> PromptRecord:
    where = f"{uri}, line {number}"
    row = {key: value for key, value in row.items() if value is not None and not (key in FIELDS and value != value)}
    if "prompt" not in row:
        raise ConfigError(f"{where}: no `prompt`{nearest('prompt', row)}")
    for key in ("prompt", "negative_prompt", "image"):
        if key in row and not isinstance(row[key], str):
            raise ConfigError(f"{where}: `{key}` is {row[key]!r}, a {type(row[key]).__name__}; it must be a text")
    for key, least in (("seed", 0), ("height", 1), ("width", 1)):
        if key in row:
            row[key] = _whole_number(row[key], f"{where}: `{key}`", least)
    if not row["prompt"].strip():
        raise ConfigError(f"{where}: `prompt` is blank")
    metadata = row.get("metadata", {})
    if not isinstance(metadata, dict):
        raise ConfigError(f"{where}: `metadata` is {metadata!r}, a {type(metadata).__name__}; it must be a mapping")
    for key, value in row.items():
        if problem := text_problem(json.dumps({key: value}, ensure_ascii=False, default=str)):
            raise ConfigError(f"{where}: `{key}` {problem}")
    others = {key: value for key, value in row.items() if key not in FIELDS}
    if twice := sorted(metadata.keys() & others.keys()):
        raise ConfigError(f"{where}: {twice[0]!r} stands both in `metadata` and beside it")
    known = {key: row[key] for key in FIELDS if key in row and key != "metadata"}
    return PromptRecord(**known, metadata={**metadata, **others}, line=number)


def _whole_number(value: Any, what: str, least: int) -> int:
    """A seed or a side in pixels; pandas makes floats of whole numbers where one is missing. Raises ConfigError."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{what} is {value!r}; it must be a whole number of at least {least}")
    if value > LARGEST_INTEGER:
        raise ConfigError(f"{what} is {value!r}; it must be at most {LARGEST_INTEGER} (2^63 - 1)")
    return value


def text_problem(text: str) -> str | None:
    """Why a text cannot be written in UTF-8, or None. JSON lets through the halves of a cut emoji, and Python makes
    such halves of the bytes of a command line that are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = ord(text[error.start])
        if 0xDC80 <= found <= 0xDCFF:
            return f"is not valid UTF-8 (the byte 0x{found - 0xDC00:02x})"
        return f"holds half of a surrogate pair, U+{found:04X}, which is not a character"
    return None
