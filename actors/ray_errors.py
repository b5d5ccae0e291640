"""Why Ray cannot be started or reached, with the remedy: Ray's own errors say neither."""

from __future__ import annotations

import os
import pwd
import re
from contextlib import suppress
from pathlib import Path

from flowgrpo_ray.errors import FlowGrpoError, ResourceError, described

_TOKEN = ("Set RAY_AUTH_MODE=token, and the cluster's token in RAY_AUTH_TOKEN, in a file named by RAY_AUTH_TOKEN_PATH, or in "
          "~/.ray/auth_token (`ray get-auth-token` prints it on a node of the cluster)")
_VERSIONS = re.compile(r"Ray: (\S+)\s+Python: (\S+)")


def cannot_start(error: Exception) -> ResourceError:
    """The error for a Ray that could not be started on this machine."""
    text = str(error)
    if "AF_UNIX path length" in text:
        path = text.rpartition(": ")[2]
        reason = (f"the path of its temporary folder is too long: its sockets would lie at {path}, and a socket's path has at "
                  f"most 107 bytes. Set RAY_TMPDIR to a folder with a shorter path, for example RAY_TMPDIR=/tmp/{_user()}")
    elif isinstance(error, OSError) and error.filename:
        owner = _owner(Path(error.filename))
        reason = (f"{error.filename} cannot be written: {error.strerror}{f' ({owner})' if owner else ''}. Set RAY_TMPDIR to a "
                  f"folder of your own with a short path, for example RAY_TMPDIR=/tmp/{_user()}")
    else:
        reason = f"{described(error)}; Ray's logs are in the folder {_temp_dir() / 'session_latest' / 'logs'}"
    return ResourceError(f"Ray cannot be started on this machine: {reason}")


def cannot_connect(error: Exception, address: str) -> ResourceError:
    """The error for a cluster that could not be reached, or did not let this driver in."""
    text = f"{error} {error.__cause__ or ''}"
    if "Version mismatch" in text and len(found := _VERSIONS.findall(text)) == 2:
        (ray, python), (our_ray, our_python) = found
        reason = (f"it runs Ray {ray} on Python {python}, and this command Ray {our_ray} on Python {our_python}. Start the "
                  "command in the cluster's environment, for example with `ray job submit`, or install these versions here")
        if ray == our_ray and python.split(".")[:2] == our_python.split(".")[:2]:
            reason += (". RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL=minor lets versions of Python in that differ in the last "
                       "part alone")
    elif "no authentication token was found" in text:
        reason = f"RAY_AUTH_MODE is token, and no token was found. {_TOKEN}"
    elif "AuthenticationError" in text or "Unauthenticated" in text:
        sent = os.environ.get("RAY_AUTH_MODE", "").lower() == "token"
        what = "another authentication token than the one that was sent" if sent else (
            "an authentication token, and none was sent, as RAY_AUTH_MODE is not token")
        reason = f"the cluster wants {what}. {_TOKEN}"
    elif isinstance(error, ConnectionError):
        ray_said = str(error).startswith("Failed to connect")  # and why it did, it says in a traceback
        reason = (f"{'no Ray answers there' if ray_said else error}. Is the cluster up, is this the address of its head (port "
                  "6379 unless `ray start` was given another), and can it be reached from here?")
    elif isinstance(error, FlowGrpoError):
        reason = str(error)
    else:
        reason = described(error)
    return ResourceError(f"cannot connect to Ray at {address} (--address or RAY_ADDRESS): {reason}")


def _owner(path: Path) -> str:
    """Whose the file or folder is that keeps `path` from being written, where it is somebody else's."""
    with suppress(OSError, StopIteration, KeyError):
        there = next(folder for folder in (path, *path.parents) if folder.exists())
        uid = there.stat().st_uid
        return f"{there} belongs to user {pwd.getpwuid(uid).pw_name}" if uid != os.getuid() else ""
    return ""


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _temp_dir() -> Path:
    """Where Ray puts its files unless it is told otherwise."""
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp", "ray")
