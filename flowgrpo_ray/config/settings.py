"""A configuration as flat settings with their marks, and what differs between two of them that matters to a resume."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flowgrpo_ray.config.paths import options_of
from flowgrpo_ray.config.schema import INFRASTRUCTURE, INPUT, RESULT, RewardConfig, Section, mark_of, marks_of


@dataclass(frozen=True)
class Setting:
    """The value of one key (plain JSON), what it decides (RESULT, EVALUATION or INFRASTRUCTURE), and whether it names an
    input, whose contents count and not its name."""

    value: Any
    mark: str
    is_input: bool = False


@dataclass(frozen=True)
class Change:
    """A key whose value differs between a checkpoint and the present configuration; None: it has none."""

    key: str
    old: str | None
    new: str | None

    def __str__(self) -> str:
        return f"{self.key}: {self.old or 'absent'} -> {self.new or 'absent'}"


def flat(section: type[Section], tree: Mapping[str, Any], prefix: str = "") -> dict[str, Setting]:
    """Every setting of a plain tree by its dotted key; what the tree leaves out has its default.

    Of `rewards` only those that are optimised are listed: a monitor (weight 0) decides nothing.
    """
    return dict(_walk(section, tree, prefix))


def _walk(section: type[Section], tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Setting]]:
    for name in dict.fromkeys([*section.model_fields, *tree]):
        field, key = section.model_fields.get(name), f"{prefix}{name}"
        if field is None:  # of another version
            yield key, Setting(tree[name], RESULT)
            continue
        value = tree.get(name, field.get_default(call_default_factory=True))
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        child = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)
        if child is None:
            yield key, Setting(_plain(value), mark_of(section, name), INPUT in marks_of(section, name))
        elif child is RewardConfig:
            for reward, options in (value or {}).items():
                if (options or {}).get("weight", 1.0) != 0:
                    yield from _reward(reward, options or {}, f"{key}.{reward}.")
        elif isinstance(value, Mapping) and child is not field.annotation:
            for part, options in value.items():
                yield from _walk(child, options or {}, f"{key}.{part}.")
        else:
            yield from _walk(child, value if isinstance(value, Mapping) else {}, f"{key}.")


def _reward(name: str, tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Setting]]:
    yield from _walk(RewardConfig, {key: value for key, value in tree.items() if key != "options"} | {"options": {}}, prefix)
    options = tree.get("options") or {}
    known = options_of(tree.get("python") or tree.get("type") or name) if options else {}
    for key, value in options.items():
        option = known.get(key)
        mark = INFRASTRUCTURE if option is not None and option.infrastructure else RESULT
        yield f"{prefix}options.{key}", Setting(_plain(value), mark, option is not None and option.path)


def changes(old: Mapping[str, Setting], new: Mapping[str, Setting], leave_out: frozenset[str] = frozenset()) -> list[Change]:
    """What differs in settings that decide the result, but for the keys of `leave_out`, which are compared by contents.

    A reward that one side lacks, or has as a monitor, is one change.
    """
    out: list[Change] = []
    one_sided = set()
    for key in sorted({*old, *new}):
        sides = [settings[key] for settings in (old, new) if key in settings]
        if key in leave_out or all(setting.mark != RESULT for setting in sides):
            continue
        reward = ".".join(key.split(".")[:2]) if key.startswith("rewards.") else ""
        missing = reward and [not any(other.startswith(f"{reward}.") for other in settings) for settings in (old, new)]
        if missing and any(missing):
            if reward not in one_sided:
                one_sided.add(reward)
                out.append(Change(reward, *(None if gone else f"weight {settings[f'{reward}.weight'].value:g}"
                                            for gone, settings in zip(missing, (old, new), strict=True))))
        elif len(sides) == 1 or sides[0].value != sides[1].value:
            out.append(Change(key, *(_text(settings[key].value) if key in settings else None for settings in (old, new))))
    return out


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=list))
