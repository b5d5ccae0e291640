"""The shipped demo model: a 5 MB diffusers pipeline that writes words, and the prompt files that go with it.

docs/tiny-model.md says how it was made and why it writes so badly; `build_model` makes it again from nothing.
"""

from __future__ import annotations

from pathlib import Path

from flowgrpo_ray.errors import ConfigError, nearest

_HERE = Path(__file__).resolve().parent
IMAGE_SIZE = (32, 64)  # height and width, pixels


def model_dir() -> Path:
    """Folder of the shipped `StableDiffusion3Pipeline` (what `builtin:tiny` means as a model).

    Raises:
        ConfigError: the package was installed without its model files.
    """
    folder = _HERE / "model"
    if not (folder / "model_index.json").is_file():
        raise ConfigError(f"builtin:tiny has no model at {folder}; make it with "
                          f"`python -m flowgrpo_ray.tiny.build_model --out {folder}`")
    return folder


def prompt_files() -> list[str]:
    """Names of the shipped prompt files, sorted."""
    return sorted(path.name for path in (_HERE / "words").glob("*.txt"))


def prompt_file(name: str) -> Path:
    """Path of a shipped prompt file (what `builtin:tiny/<name>` means): one prompt a line, `the word "CAT"`.

    Raises:
        ConfigError: no shipped prompt file has this name.
    """
    if name not in prompt_files():
        raise ConfigError(f"builtin:tiny has no prompt file {name!r}{nearest(name, prompt_files())}")
    return _HERE / "words" / name
