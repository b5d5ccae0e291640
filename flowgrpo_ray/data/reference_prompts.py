"""Prompt sets of the reference implementation (github.com/yifan123/flow_grpo, folder dataset/), made into prompt files.

A set is a folder with `train.txt` and `test.txt` (a prompt a line: ocr, pickscore) or `train_metadata.jsonl` and
`test_metadata.jsonl` (an object a line with `prompt`, `tag`, `include`, `exclude` and so on: geneval; `image` in sets for
editing). Only local files are read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace

from flowgrpo_ray import storage
from flowgrpo_ray.data.prompts import PromptRecord, load_prompts
from flowgrpo_ray.errors import ConfigError, counted

SPLITS = ("train", "test")
_REWARDS = ("ocr", "geneval")  # sets that are named after a reward with a rule for its prompts
_LINES_SHOWN = 5


def convert(folder: str, out: str) -> Iterator[str]:
    """Write `<set>/train` and `<set>/test` (.txt, or .jsonl with metadata) into `out` for every set in `folder`.

    `folder` may be a set itself.

    Prompts that the reward of the set cannot score are left out. Relative condition images become paths in `folder`. Yields
    lines that say what was written, what was left out and why, and what to put into a configuration.

    Raises:
        ConfigError: no such folder, no set in it, a bad line (named), or an `out` that holds the sets themselves.
    """
    sets = _sets(folder)
    for uri in sets:
        name, written, seen = storage.base_name(uri), {}, {}
        if storage.resolve(storage.join(out, name)) == storage.resolve(uri):
            raise ConfigError(f"--out {storage.display(out)} holds the sets themselves; give another folder")
        for split, source in _files(uri).items():
            records = [_located(record, uri) for record in load_prompts(source)]
            problems = {record.line: why for record in records if (why := _problem(name, record))}
            kept = [record for record in records if record.line not in problems]
            if not kept:
                raise ConfigError(f"{source}: no prompt of it can be used: {next(iter(problems.values()))}")
            bare = source.partition("?")[0].endswith(".txt")
            target = written[split] = storage.join(out, name, f"{split}{'.txt' if bare else '.jsonl'}")
            text = "".join(record.prompt + "\n" if bare else _line(record) for record in kept)
            storage.write_bytes(target, text.encode())
            seen[split] = {record.prompt for record in kept}
            repeated = len(kept) - len(seen[split])
            again = f", {repeated} of them repeated" if repeated else ""
            yield f"{storage.display(target)}: {counted(len(kept), 'prompt')}{again}"
            if problems:
                lines = ", ".join(str(line) for line in list(problems)[:_LINES_SHOWN])
                more = ", …" if len(problems) > _LINES_SHOWN else ""
                yield f"  left out: {len(problems)} (line {lines}{more}): {next(iter(problems.values()))}"
        if shared := len(set.intersection(*seen.values())) if len(seen) > 1 else 0:
            yield f"  prompts that are in both files, and so not held out: {shared}"
        keys = {"train": "data.train_prompts", "test": "data.eval_prompts"}
        yield "  " + " ".join(f"{keys[split]}={storage.display(target)}" for split, target in written.items())


def _sets(folder: str) -> list[str]:
    if _files(folder):
        return [folder.rstrip("/")]
    found = [uri for name in storage.list_dir(folder) if _files(uri := storage.join(folder, name))]
    if not found:
        raise ConfigError(f"no prompt set in {storage.display(folder)}: give the folder dataset/ of a local copy of flow_grpo "
                          "(git clone https://github.com/yifan123/flow_grpo), or one of the folders in it, which hold "
                          "train.txt or train_metadata.jsonl")
    return found


def _files(folder: str) -> dict[str, str]:
    """Split to file; metadata, if there are any, are taken rather than bare prompts."""
    names = storage.list_dir(folder)
    out: dict[str, str] = {}
    for split in SPLITS:
        for name in (f"{split}_metadata.jsonl", f"{split}.txt"):
            if name in names:
                out.setdefault(split, storage.join(folder, name))
    return out


def _located(record: PromptRecord, folder: str) -> PromptRecord:
    """The record with a condition image that is found from anywhere."""
    if record.image is None or "://" in record.image or os.path.isabs(record.image):
        return record
    local = storage.local_path(folder)
    return replace(record, image=storage.join(str(local) if local is not None else folder, record.image))


def _problem(name: str, record: PromptRecord) -> str | None:
    """Why the reward that a set is named after cannot score a prompt, or None."""
    from flowgrpo_ray.rewards import reward_class
    from flowgrpo_ray.rewards.base import prompt_problem

    return prompt_problem(name, reward_class(name), record, {}) if name in _REWARDS else None


def _line(record: PromptRecord) -> str:
    known = {"prompt": record.prompt, "negative_prompt": record.negative_prompt, "seed": record.seed,
             "height": record.height, "width": record.width, "image": record.image, "metadata": record.metadata or None}
    return json.dumps({key: value for key, value in known.items() if value is not None}, ensure_ascii=False) + "\n"
