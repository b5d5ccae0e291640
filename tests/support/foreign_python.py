"""Pythons of their own, for tests of rewards that live in another environment than the run."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

# A reward as it may exist only there: its module is in no environment but that one.
MODULE = '''
import importlib.util
import os
import sys


class OnlyThereError(Exception):
    pass


def where(images, prompts, metadata, *, executable=""):
    """1 for every image, where this runs in the Python that it should, without anything of the run's environment."""
    import actors.reward
    import flowgrpo_ray.rewards

    assert sys.executable == executable, sys.executable
    assert importlib.util.find_spec("torch") is None
    places = [os.path.dirname(os.path.dirname(module.__file__)) for module in (actors, flowgrpo_ray)]
    assert places[0] == places[1] and places[0] not in sys.path, (places, sys.path)
    return [1.0] * len(images)


def fails(images, prompts, metadata):
    """Raises what only this environment knows."""
    raise OnlyThereError("not today")
'''


def bare(folder: Path) -> Path:
    """A new virtual environment with nothing in it; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder / "bin" / "python"


def site_packages(python: Path) -> Path:
    return next((python.parent.parent / "lib").glob("python3*")) / "site-packages"


def linked(folder: Path) -> Path:
    """One with Ray, what Ray needs, numpy and the module `only_there`, and nothing else; its Python.

    The distributions are links to those of the tests' environment: the same files, and no download.
    """
    python = bare(folder)
    target, names, seen = site_packages(python), ["ray", "numpy", "pillow"], set()
    while names:
        name = names.pop()
        if name in seen:
            continue
        seen.add(name)
        distribution = metadata.distribution(name)
        for part in {Path(file).parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            if not (target / part).exists():
                (target / part).symlink_to(distribution.locate_file(part))
        for wanted in map(Requirement, distribution.requires or ()):
            if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
                names.append(wanted.name)
    (target / "only_there.py").write_text(MODULE)
    return python


def pretend(folder: Path, *distributions: tuple[str, str]) -> Path:
    """One that has the records of distributions, (name, version), and no files of them."""
    python = bare(folder)
    for name, version in distributions:
        info = site_packages(python) / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return python


def installed(folder: Path, *requirements: str) -> Path:
    """One that pip has filled; its Python."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    subprocess.run([str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *requirements], check=True)
    return python


def wheel(folder: Path, name: str, source: str) -> Path:
    """A wheel of one module, version 1."""
    path, info = folder / f"{name}-1-py3-none-any.whl", f"{name}-1.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", source)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return path
