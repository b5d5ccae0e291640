"""Where a run's numbers come from: package versions and, if it is known, the commit of the code."""

from __future__ import annotations

import json
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

from flowgrpo_ray import __version__

PACKAGES = ("ray", "torch", "diffusers", "transformers", "peft")
COMMIT_FILE = "commit.json"  # beside this file in an uploaded package or an image: what `commit` returns
_GIT_TIMEOUT_S = 5.0


def versions() -> dict[str, str]:
    """Version of this package, of Python, and of the packages that decide numbers; "not installed" where one is missing."""
    found = {"flowgrpo-ray": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def commit(source: Path | None = None) -> dict[str, Any] | None:
    """`{"id": hash, "dirty": bool}` of the code of this package; None if it is not known.

    It is known in a git working tree that tracks the package (`dirty`: tracked files differ from the commit), for code that
    came with a submitted job (COMMIT_FILE), and for a package that pip installed from a repository (PEP 610).
    """
    folder = source or Path(__file__).parent
    try:
        found = json.loads((folder / COMMIT_FILE).read_text())
        return {"id": str(found["id"]), "dirty": bool(found["dirty"])}
    except (OSError, ValueError, KeyError, TypeError):
        pass
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is not None and (found := _git(folder, "rev-parse", "HEAD")):
        return {"id": found, "dirty": bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))}
    try:
        installed = json.loads(distribution("flowgrpo-ray").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return None
    found = installed.get("vcs_info", {}).get("commit_id") if source is None else None
    return {"id": found, "dirty": False} if found else None


def code() -> str:
    """The code in a line: version, commit, and the packages that decide numbers."""
    found = commit()
    where = f"commit {found['id'][:12]}{', with changes' if found['dirty'] else ''}" if found else "commit unknown"
    own, *others = versions().items()
    return f"{own[0]} {own[1]} ({where}); " + ", ".join(f"{name} {number}" for name, number in others)


def stamp(step: int) -> dict[str, Any]:
    """What is recorded when a driver starts, or resumes, a run at `step`."""
    return {"step": step, "time": datetime.now(UTC).isoformat(timespec="seconds"), "versions": versions(),
            "commit": commit(), "platform": platform.platform()}


def _git(folder: Path, *args: str) -> str | None:
    """Output of a git command in `folder`; None if it fails or there is no git."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *args], capture_output=True, text=True, timeout=_GIT_TIMEOUT_S,
                              check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
