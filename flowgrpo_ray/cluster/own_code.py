"""The files of a user's own rewards: `python: module:function`, and what such a module imports from beside itself."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from flowgrpo_ray.config import Config

OURS = ("flowgrpo_ray", "actors")
NOT_CODE = ("__pycache__", ".git", ".venv", "venv", "node_modules", ".ipynb_checkpoints")


def own_code(config: Config) -> dict[str, Path]:
    """Files of the rewards' own modules by their path below an import root.

    A module brings itself and what it imports from its own folder, functions' imports too; a package comes whole. Not
    among them: what is installed (the image must have it), and modules that exist only in the reward's own environment.
    """
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # as the registry does
    found: dict[str, Path] = {}
    for reward in config.rewards.values():
        top = (reward.python or "").partition(":")[0].partition(".")[0]
        if top and top not in OURS:
            for root in _roots(top):
                _take(top, root, found)
    return found


def _roots(name: str) -> list[Path]:
    """Folders from which a top-level module is imported, without those of installed packages."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:  # a package, maybe in several folders and without __init__.py
        roots = [Path(place).absolute().parent for place in spec.submodule_search_locations]
    elif spec.has_location and spec.origin:
        roots = [Path(spec.origin).absolute().parent]
    else:  # built in
        return []
    return [root for root in roots if not is_installed(root)]


def is_installed(folder: Path) -> bool:
    places = {Path(sysconfig.get_path(key)) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    return any(folder.is_relative_to(place) for place in places) or (
        bool({"site-packages", "dist-packages"} & set(folder.parts)))


def _take(name: str, root: Path, found: dict[str, Path]) -> None:
    """Add the module or package `name` of the folder `root`, and what it imports from there."""
    files = dict(_files(name, root))
    new = {key: path for key, path in files.items() if key not in found}
    found |= new
    for path in new.values():
        if path.suffix == ".py":
            for other in _imports(path):
                if other != name and other not in OURS:
                    _take(other, root, found)


def _files(name: str, root: Path) -> Iterator[tuple[str, Path]]:
    folder = root / name
    if (folder / "__init__.py").is_file():
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not set(NOT_CODE) & set(path.relative_to(root).parts):
                yield path.relative_to(root).as_posix(), path
        return
    for suffix in (".py", *importlib.machinery.EXTENSION_SUFFIXES):
        if (root / f"{name}{suffix}").is_file():
            yield f"{name}{suffix}", root / f"{name}{suffix}"
            return
    if folder.is_dir():  # a folder of modules without __init__.py
        for path in sorted(folder.rglob("*.py")):
            if not set(NOT_CODE) & set(path.relative_to(root).parts):
                yield path.relative_to(root).as_posix(), path


def _imports(file: Path) -> set[str]:
    """Top-level names that a file imports, anywhere in it."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return set()
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names
