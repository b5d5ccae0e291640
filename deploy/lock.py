"""Write the lock files of the images: every package with its version and the hashes of its files.

    pip install uv && python -m deploy.lock

Packages that are installed where this runs keep their versions: images carry what was tested.
`--torch-cpu` is where pip finds torch's CPU build, a page of links or a folder; only its hash is read.

    requirements.lock    pyproject's dependencies and the images' extras, without torch's CUDA
    torch-cuda.lock      torch from PyPI, with CUDA's libraries
    torch-cpu.lock       the same torch without them
    image-reward.lock    the packages of the second environment, beside torch
    models.lock          wheels that go in without the packages that they name (see Makefile)
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from importlib.metadata import distributions
from pathlib import Path

from flowgrpo_ray.cluster.versions import RAY_VERSION

DEPLOY = Path(__file__).resolve().parent
PYTHON = "3.11"
TORCH = "2.13.0"
CPU_PAGE = "https://download.pytorch.org/whl/cpu/torch/"
EXTRAS = ("ocr", "geneval", "wandb")
# What an actor of image_reward imports; the rest of what its package names is not needed.
IMAGE_REWARD = (
    f"ray=={RAY_VERSION}",
    "transformers==4.44.2",
    "huggingface-hub<1",
    "numpy>=2",
    "pillow",
    f"torch=={TORCH}",
)
MODELS = ("rapidocr==3.10.0", "image-reward==1.5")
CUDA = re.compile(r"nvidia-|cuda-|triton$")

HEAD = "# Python {python} on Linux x86_64. Written by `python -m deploy.lock`: do not edit.\n"


def compiled(
    requirements: Collection[str], constraints: Mapping[str, str], *args: str
) -> dict[str, str]:
    """Packages that requirements resolve to: name -> its lines in a lock file."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, bounds = Path(folder) / "in.txt", Path(folder) / "constraints.txt"
        wanted.write_text("\n".join(requirements))
        bounds.write_text("\n".join(f"{name}=={version}" for name, version in constraints.items()))
        files = [str(wanted)] if requirements else []
        done = subprocess.run(
            [
                "uv",
                "pip",
                "compile",
                *files,
                *args,
                "--constraint",
                str(bounds),
                "--generate-hashes",
                "--python-version",
                PYTHON,
                "--python-platform",
                "x86_64-manylinux_2_28",
                "--no-header",
                "--no-annotate",
            ],
            capture_output=True,
            text=True,
            cwd=DEPLOY.parent,
        )
    if done.returncode:
        sys.exit(done.stderr)
    blocks = re.split(r"(?m)^(?=[A-Za-z0-9])", done.stdout)
    return {block.partition("==")[0]: block for block in blocks if "==" in block}


def versions(locked: Mapping[str, str]) -> dict[str, str]:
    """name -> version."""
    return {name: block.partition("==")[2].split()[0] for name, block in locked.items()}


def installed() -> dict[str, str]:
    """Versions in this environment, without local builds (2.13.0+cpu) and this package."""
    found = {re.sub(r"[-_.]+", "-", dist.name).lower(): dist.version for dist in distributions()}
    return {
        name: version
        for name, version in found.items()
        if "+" not in version and name != "flowgrpo-ray"
    }


def cpu_torch(source: str) -> str:
    """The lines of torch's CPU build, which is not on PyPI."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--no-index",
                "--find-links",
                source,
                "--dest",
                folder,
                f"torch=={TORCH}+cpu",
            ],
            check=True,
        )
        (wheel,) = Path(folder).glob("*.whl")
        return f"torch=={TORCH}+cpu \\\n    --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"


def write(name: str, locked: Mapping[str, str], head: str = "") -> None:
    """A lock file, sorted by package."""
    text = (
        HEAD.format(python=PYTHON) + head + "".join(locked[package] for package in sorted(locked))
    )
    (DEPLOY / name).write_text(text)
    print(f"{name}: {len(locked)} packages")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--torch-cpu", default=CPU_PAGE, help="page or folder with torch's CPU build"
    )
    source = parser.parse_args().torch_cpu
    pins = {**installed(), "ray": RAY_VERSION, "torch": TORCH}
    whole = compiled(
        (), pins, "pyproject.toml", *(arg for extra in EXTRAS for arg in ("--extra", extra))
    )
    same = versions(whole)
    torch = compiled([f"torch=={TORCH}"], same)
    cuda = {name for name in torch if CUDA.match(name)} | {"torch"}
    write("requirements.lock", {name: block for name, block in whole.items() if name not in cuda})
    write("torch-cuda.lock", torch)
    write(
        "torch-cpu.lock",
        {
            **{name: block for name, block in torch.items() if name not in cuda},
            "torch": cpu_torch(source),
        },
        f"--find-links {CPU_PAGE}\n",
    )
    beside = {
        name: version
        for name, version in same.items()
        if name not in ("transformers", "huggingface-hub", "tokenizers")
    }
    second = compiled(IMAGE_REWARD, beside)
    write("image-reward.lock", {name: block for name, block in second.items() if name not in cuda})
    loose = compiled(MODELS, {})
    write(
        "models.lock",
        {name: loose[name] for name in (model.partition("==")[0] for model in MODELS)},
    )


if __name__ == "__main__":
    main()
