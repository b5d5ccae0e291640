"""YAML of configurations: read as YAML 1.2, written so that readers of YAML 1.1 understand the same.

In 1.2, `010` is ten and `1:30` is a string; PyYAML, which reads 1.1, makes 8 and 90 of them, and a
string of `1e-3`.
"""

from __future__ import annotations

import re
from typing import Any

import yaml
from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError, SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError


class _Constructor(SafeConstructor):
    """Dates, which YAML 1.2 does not know, stay strings."""


for _tag in ("timestamp", "value"):
    _Constructor.add_constructor(f"tag:yaml.org,2002:{_tag}", SafeConstructor.construct_yaml_str)


def parse(text: str) -> Any:
    """The value of a YAML 1.2 document.

    Raises:
        ValueError: not valid YAML, or a key is given twice; says where, in one line.
    """
    reader = YAML(typ="safe", pure=True)
    reader.Constructor = _Constructor
    try:
        return reader.load(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (YAMLError, ValueError) as error:  # ValueError: a number of thousands of digits
        raise ValueError(_described(error)) from None


def _described(error: Exception) -> str:
    if not isinstance(error, MarkedYAMLError):
        return re.sub(r"\s+", " ", str(error).replace(' in "<unicode string>",', " at"))
    mark = error.problem_mark or error.context_mark
    what = error.problem or error.context
    if isinstance(error, DuplicateKeyError):
        key = re.search(r'duplicate key "(.*?)"', what, re.DOTALL)
        what = f"duplicate key {key[1]!r}" if key else "duplicate key"
    return f"{what} (line {mark.line + 1}, column {mark.column + 1})" if mark else str(what)


class _Dumper(yaml.SafeDumper):
    """Quotes every string that any YAML might read as a number."""


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+.]*[0-9][-+.0-9a-fA-FxoXO_]*$"), list("-+.0123456789"))


def dump(tree: Any, **style: Any) -> str:
    """A plain tree as YAML; `style` goes to `yaml.dump`."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, **style)
