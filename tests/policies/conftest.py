"""Pipelines on disk and policies over them; a policy that a test changes is loaded by the test itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tiny_pipelines
import torch

from flowgrpo_ray.config.schema import ModelConfig
from flowgrpo_ray.policies import load_policy
from flowgrpo_ray.policies.base import Policy

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> Callable[[str], str]:
    """folder of a kind of `tiny_pipelines`, built once."""
    built: dict[str, str] = {}

    def folder(kind: str) -> str:
        if kind not in built:
            built[kind] = str(tiny_pipelines.build(kind, tmp_path_factory.mktemp("pipelines") / kind))
        return built[kind]

    return folder


@pytest.fixture(scope="session")
def fresh(folders) -> Callable[..., Policy]:
    """fresh(kind, parts="all", **model options): a policy of your own."""

    def load(kind: str, parts: str = "all", **options) -> Policy:
        path = kind if kind.startswith("builtin:") else folders(kind)
        options.setdefault("max_sequence_length", 12)
        return load_policy(ModelConfig(path=path, **options), parts=parts)

    return load


@pytest.fixture(scope="session")
def shared(fresh) -> Callable[[str], Policy]:
    """shared(kind): one policy per kind, for tests that change nothing in it."""
    loaded: dict[str, Policy] = {}

    def load(kind: str) -> Policy:
        if kind not in loaded:
            loaded[kind] = fresh(kind)
        return loaded[kind]

    return load
