"""Prompts that a model's text encoders cut: what is lost is said before the run starts."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from flowgrpo_ray.data.prompts import PromptRecord
from flowgrpo_ray.errors import ConfigError, counted
from flowgrpo_ray.policies.text import PromptReader, Seen

log = logging.getLogger(__name__)

SHOWN = 5  # prompts, and groups of equal ones, that a message lists
CONTEXT = 30  # characters shown on both sides of a cut

Span = Callable[[PromptRecord], tuple[int, int] | None]


def check_lengths(
    key: str, uri: str, records: Sequence[PromptRecord], reader: PromptReader, needed: Mapping[str, Span], *,
    reject: bool,
) -> None:
    """Warn of prompts whose end no text encoder of the model reads, and of those that are equal once they are cut.

    Args:
        key: of the configuration, that names the file; uri: the file.
        needed: by reward, the part of a prompt that the model must see.
        reject: a cut prompt is an error.

    Raises:
        ConfigError: a prompt is cut before the end of what a reward needs, or `reject` and any is cut.
    """
    seen = reader.read([record.prompt for record in records])
    cut = [(record, one.end) for record, one in zip(records, seen, strict=True) if one.end is not None]
    if not cut:
        return
    for reward, span in needed.items():
        lost = [record.line for record, end in cut if (part := span(record)) is not None and part[1] > end]
        if lost:
            raise ConfigError(
                f"{key}: the text that reward {reward} looks for is cut off in {len(lost)} of "
                f"{counted(len(records), 'prompt')} in {uri} ({reader.described()}): "
                f"line{'s' if len(lost) > 1 else ''} {ranges(lost)}; "
                f"shorten these prompts, or put the text first{_advice(reader)}")
    lines = [f"  line {record.line}: ...{record.prompt[max(0, end - CONTEXT):end]!r} is read, "
             f"{record.prompt[end:end + CONTEXT]!r}... is not" for record, end in cut[:SHOWN]]
    if len(cut) > SHOWN:
        lines.append(f"  and {len(cut) - SHOWN} more")
    lines += [f"  lines {ranges(same)} are one prompt to the model" for same in _equal(records, seen)]
    text = (f"{key}: the model does not read the end of {len(cut)} of {counted(len(records), 'prompt')} in {uri} "
            f"({reader.described()}):\n" + "\n".join(lines))
    if reject:
        raise ConfigError(f"{text}\nshorten them, or set data.on_long_prompt: warn{_advice(reader)}")
    log.warning("%s\n(data.on_long_prompt: error rejects them%s)", text, _advice(reader))


def _equal(records: Sequence[PromptRecord], seen: Sequence[Seen]) -> list[list[int]]:
    """Lines of different prompts that have the same tokens because at least one of them is cut."""
    groups: dict[object, list[int]] = defaultdict(list)
    for i, one in enumerate(seen):
        if one.tokens is not None:
            groups[one.tokens].append(i)
    same = [[records[i].line for i in group] for group in groups.values()
            if len({records[i].prompt for i in group}) > 1 and any(seen[i].end is not None for i in group)]
    return same[:SHOWN]


def _advice(reader: PromptReader) -> str:
    """How the model could be made to read more, if it could."""
    longest = reader.longest_sequence
    return f"; model.max_sequence_length can be raised to {longest}" if longest else ""


def ranges(lines: Sequence[int]) -> str:
    """Line numbers in ascending order, for people: "3, 7-9"."""
    runs: list[list[int]] = []
    for line in lines:
        if runs and line == runs[-1][1] + 1:
            runs[-1][1] = line
        else:
            runs.append([line, line])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
