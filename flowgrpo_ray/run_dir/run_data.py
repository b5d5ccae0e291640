"""What a run directory says about its run, read once for the report, the doctor and a comparison."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import yaml

from flowgrpo_ray import storage
from flowgrpo_ray.run_dir.metrics import Row, read_metrics


@dataclass(frozen=True)
class RunData:
    """Rows of metrics, configuration and identity of a run; what is missing or unreadable is empty.

    `config` is a plain tree, since a run of an older version may hold keys that are unknown today.
    """

    run_dir: str
    rows: list[Row]
    config: dict[str, Any]
    config_text: str
    identity: dict[str, Any]

    @classmethod
    def read(cls, run_dir: str) -> RunData:
        """Read a run directory. Raises FlowGrpoError, which names the file, if rows are damaged."""
        text = _text(storage.join(run_dir, "config.yaml"))
        return cls(run_dir, read_metrics(run_dir), _tree(text), text, _identity(_text(storage.join(run_dir, "run.json"))))

    @property
    def name(self) -> str:
        return str(self.at("run", "name") or storage.base_name(self.run_dir))

    @property
    def weights(self) -> str:
        """Which weights the headline is of: "policy" or "ema"."""
        return str(self.at("eval", "weights") or "policy")

    @property
    def training(self) -> list[Row]:
        """Rows of training steps: without that of the evaluation at the start, and without that of a step that stopped."""
        return [row for row in self.rows if row["step"] > 0 and "stopped" not in row]

    @property
    def starts(self) -> list[dict[str, Any]]:
        """Stamps of every driver that started or resumed the run (see `provenance.stamp`)."""
        found = self.identity.get("starts")
        return [start for start in found if isinstance(start, dict)] if isinstance(found, list) else []

    def at(self, section: str, key: str) -> Any:
        part = self.config.get(section)
        return part.get(key) if isinstance(part, dict) else None


def _text(uri: str) -> str:
    return storage.read_bytes(uri).decode(errors="replace") if storage.size(uri) else ""


def _tree(text: str) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}  # still shown as text
    return tree if isinstance(tree, dict) else {}


def _identity(text: str) -> dict[str, Any]:
    try:
        tree = json.loads(text or "{}")
    except ValueError:
        return {}
    return tree if isinstance(tree, dict) else {}
