"""What is uploaded with a submitted run: an archive that becomes the working directory of the job and of its actors.

    flowgrpo_job/config.yaml      the resolved configuration, its paths those of the archive
    flowgrpo_job/<key>/<name>     files that it names (prompts, an adapter to start from)
    flowgrpo_ray/, actors/        the code of this checkout, unless the image's own is to run
    anything else                 modules of your own rewards, and the files of --working-dir

The folder is first on PYTHONPATH in every process of the job, so its code runs, not the image's. The bytes depend on the
contents alone: what was uploaded once is not uploaded again.
"""

from __future__ import annotations

import json
import os
import stat
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

from flowgrpo_ray.cluster.own_code import NOT_CODE, OURS, is_installed, own_code
from flowgrpo_ray.config.load import Config, to_yaml
from flowgrpo_ray.config.paths import paths_of
from flowgrpo_ray.errors import ConfigError
from flowgrpo_ray.provenance import COMMIT_FILE, commit

LARGEST = 50 * 2**20  # bytes of the archive
FOLDER = "flowgrpo_job"
CONFIG_FILE = f"{FOLDER}/config.yaml"
WEIGHTS = (".safetensors", ".ckpt", ".pt", ".pth", ".bin", ".gguf", ".onnx", ".h5", ".pdiparams")
ALWAYS_OUT = (*NOT_CODE, "runs", ".pytest_cache", ".ruff_cache", ".DS_Store")
_TINY_MODEL = "flowgrpo_ray/tiny/model/"
_SOURCE = Path(__file__).resolve().parents[2]


@dataclass
class Package:
    """Files by their path in the archive.

    Attributes:
        notes: what is not packed although the configuration names it, for the user.
        code: what code the run gets, in words.
    """

    files: dict[str, Path | bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    code: str = ""

    def write(self, target: Path) -> int:
        """Write the archive and return its size in bytes. Raises ConfigError as soon as it is too large."""
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in sorted(self.files.items()):
                info = zipfile.ZipInfo(name)  # 1980: equal contents are equal bytes
                info.compress_type = zipfile.ZIP_DEFLATED
                executable = isinstance(content, Path) and os.access(content, os.X_OK)
                info.external_attr = (stat.S_IFREG | (0o755 if executable else 0o644)) << 16
                if isinstance(content, Path):
                    with content.open("rb") as source, archive.open(info, "w") as stored:
                        while block := source.read(2**20):
                            stored.write(block)
                            self._check(target.stat().st_size)
                else:
                    archive.writestr(info, content)
        size = target.stat().st_size
        self._check(size)
        return size

    def _check(self, size: int) -> None:
        if size <= LARGEST:
            return
        sizes = {name: content.stat().st_size if isinstance(content, Path) else len(content)
                 for name, content in self.files.items()}
        largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
        shown = ", ".join(f"{name} ({sizes[name] / 2**20:.1f} MiB)" for name in largest)
        raise ConfigError(
            f"what the run reads makes a package of more than {LARGEST >> 20} MiB; its largest files are {shown}. Put large "
            "files into the image, on a volume or into an object store, or leave them out with a line in .rayignore (in the "
            "folder of --working-dir)")


def ships_code() -> bool:
    """Whether this package runs from a checkout, whose code is then sent along; an installed one is that of an image."""
    return not is_installed(_SOURCE)


def build(config: Config, *, image_code: bool = False, working_dir: Path | None = None) -> Package:
    """Collect what a run reads. `config` is as loaded for a job: paths absolute.

    Args:
        image_code: leave this package's code out; that of the cluster's image runs.
        working_dir: a folder that comes whole, but for what .gitignore and .rayignore say, weights and ALWAYS_OUT.

    Raises:
        ConfigError: `working_dir` is not a folder.
    """
    package = Package()
    if working_dir is not None:
        package.files |= _folder(working_dir)
    if image_code or not ships_code():
        package.code = "the code of the cluster's image"
        for name in [name for name in package.files if name.partition("/")[0] in OURS]:
            del package.files[name]  # --working-dir is a checkout
    else:
        package.files |= _our_code(with_model=config.model.path == "builtin:tiny")
        found = commit()
        package.code = "the code of this checkout" + (
            f", commit {found['id'][:10]}{' with changes' if found['dirty'] else ''}" if found else "")
        if found:
            package.files[f"flowgrpo_ray/{COMMIT_FILE}"] = json.dumps(found).encode()
    package.files = {**own_code(config), **package.files}
    settings = _Relocation(package, working_dir).of(config)
    package.files[CONFIG_FILE] = to_yaml(settings).encode()
    return package


def on_cluster_only(config: Config) -> list[str]:
    """Keys of inputs whose absolute path leads to nothing here and is not below the working directory, so that it is
    meant to be on the cluster: a volume, or a folder of the image."""
    here = Path.cwd()
    named = {"model.path": config.model.path, "lora.init_from": config.lora.init_from,
             "data.train_prompts": config.data.train_prompts, "data.eval_prompts": config.data.eval_prompts}
    return [key for key, value in named.items() if value and os.path.isabs(value) and not os.path.exists(value)
            and not Path(value).is_relative_to(here)]


def _our_code(with_model: bool) -> dict[str, Path | bytes]:
    """This package's files; the weights of the tiny model, 5 MB, only for runs that use it."""
    found: dict[str, Path | bytes] = {}
    for top in OURS:
        for path in sorted((_SOURCE / top).rglob("*")):
            name = path.relative_to(_SOURCE).as_posix()
            if path.is_file() and path.parent.name != "__pycache__" and (
                    with_model or not name.startswith(_TINY_MODEL)):
                found[name] = path
    return found


def _folder(folder: Path) -> dict[str, Path | bytes]:
    """Files of a folder, but for what is to be left out."""
    from pathspec import GitIgnoreSpec

    if not folder.is_dir():
        raise ConfigError(f"--working-dir {folder} is not a folder")
    found: dict[str, Path | bytes] = {}

    def walk(inside: Path, rules: list[tuple[Path, GitIgnoreSpec]]) -> None:
        for name in (".gitignore", ".rayignore"):
            if (file := inside / name).is_file():
                rules = [*rules, (inside, GitIgnoreSpec.from_lines(file.read_text(errors="replace").splitlines()))]
        for path in sorted(inside.iterdir()):
            mark = "/" if path.is_dir() else ""
            if path.name in ALWAYS_OUT or any(
                    rule.match_file(path.relative_to(base).as_posix() + mark) for base, rule in rules):
                continue
            if path.is_dir():
                if not path.is_symlink():
                    walk(path, rules)
            elif path.is_file() and path.suffix not in WEIGHTS:
                found[path.relative_to(folder).as_posix()] = path

    walk(folder, [])
    return found


class _Relocation:
    """Puts the files that a configuration names into the package, and makes its paths those of the archive."""

    def __init__(self, package: Package, working_dir: Path | None) -> None:
        self._package = package
        self._base = working_dir.absolute() if working_dir is not None else None

    def of(self, config: Config) -> Config:
        copy = config.model_copy(deep=True)
        for path in paths_of(copy):
            if path.key != "run.dir":
                path.put(self._place(path.key, path.value))
        return copy

    def _place(self, key: str, value: str) -> str:
        """What a path is in the job; one that is not packed stays as it is."""
        if "://" in value or not os.path.isabs(value):
            return value
        path = Path(value)
        if not path.exists():
            self._package.notes.append(f"{key} {value} is not on this machine; the job looks for it on the cluster")
            return value
        if self._base is not None and path.is_relative_to(self._base):
            inside = path.relative_to(self._base)
            for file in [path] if path.is_file() else sorted(path.rglob("*")):
                if file.is_file():
                    self._package.files[file.relative_to(self._base).as_posix()] = file
            return f"./{inside.as_posix()}"
        if key == "lora.init_from":
            from flowgrpo_ray.policies.lora import adapter_file

            file = adapter_file(path)
            self._package.files[f"{FOLDER}/{key}/{file.name}"] = file
            return f"{FOLDER}/{key}" if path.is_dir() else f"{FOLDER}/{key}/{file.name}"
        if path.is_file() and path.suffix not in WEIGHTS:
            self._package.files[f"{FOLDER}/{key}/{path.name}"] = path
            return f"./{FOLDER}/{key}/{path.name}"
        self._package.notes.append(f"{key} {value} is not packed: it must be at this path on every node of the cluster"
                                   + ("" if self._base else ", or in the folder of --working-dir"))
        return value
