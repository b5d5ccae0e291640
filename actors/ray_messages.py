"""What Ray has to say to a driver (a node is gone, a process was ended for want of memory) as records of our own log.

Ray prints it to standard output, in colours, and where a raylet was killed with the last 20 lines of its log, once for each of
the two agents that saw it, whatever `log_to_driver` is.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import ray

log = logging.getLogger("ray.cluster")

# Where the part of a message ends that says what happened.
_REST = re.compile(r"\n| Possible reasons include:| This can happen when| To troubleshoot the problem")

_said: set[str] = set()


def join_ours() -> None:
    """From now on Ray's messages go through logging: the first line of each, once; at level debug in full."""
    worker = ray._private.worker
    plain = worker.print_to_stdstream  # what a thread of Ray's calls with every message
    if getattr(plain, "is_ours", False):
        return

    def tell(data: dict[str, Any], ignore_prefix: bool) -> None:
        if data.get("pid") != "raylet":
            plain(data, ignore_prefix)  # lines of actors, at level debug
            return
        for message in data["lines"]:
            _tell(message)

    tell.is_ours = True  # type: ignore[attr-defined]
    worker.print_to_stdstream = tell


def _tell(message: str) -> None:
    log.debug("%s", message)
    line = _REST.split(message.strip(), maxsplit=1)[0]
    if line and line not in _said:
        _said.add(line)
        log.warning("%s", line)
