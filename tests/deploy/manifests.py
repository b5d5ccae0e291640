"""Manifests of deploy/kuberay as Kubernetes would get them, and what their schemas and KubeRay's operator say of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
KUBERAY = ROOT / "deploy" / "kuberay"
SCHEMAS = Path(__file__).parent / "schemas"
OVERLAYS = ("cpu-demo", "gpu-1", "gpu-8", "gpu-64")
# pvc is in every overlay already.
COMPONENTS = ("s3", "spot", "kueue", "model-cache", "monitoring", "interactive")
KUBERNETES = "1.32"
CUSTOM = {("ray.io/v1", "RayJob"): "rayjob", ("ray.io/v1", "RayCluster"): "raycluster",
          ("monitoring.coreos.com/v1", "PodMonitor"): "podmonitor",
          ("monitoring.coreos.com/v1", "PrometheusRule"): "prometheusrule"}

Tree = dict[str, Any]
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl, which brings kustomize, is not installed")


def kustomize(folder: Path) -> str:
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@cache
def _rendered(overlay: str, components: tuple[str, ...], folder: Path) -> str:
    if not components:
        return kustomize(KUBERAY / "overlays" / overlay)
    folder.mkdir(exist_ok=True)
    there = os.path.relpath(KUBERAY, folder.resolve())
    (folder / "kustomization.yaml").write_text(yaml.safe_dump({
        "apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization",
        "resources": [f"{there}/overlays/{overlay}"],
        "components": [f"{there}/components/{name}" for name in components]}))
    return kustomize(folder)


def rendered(overlay: str, components: tuple[str, ...], scratch: Path) -> list[Tree]:
    """The resources of an overlay with components on top, freshly parsed."""
    return documents(_rendered(overlay, components, scratch / "-".join((overlay, *components))))


def documents(text: str) -> list[Tree]:
    return [tree for tree in yaml.safe_load_all(text) if tree is not None]


def of_kind(docs: list[Tree], kind: str) -> list[Tree]:
    return [tree for tree in docs if tree["kind"] == kind]


@cache
def _validator(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads((SCHEMAS / f"{name}.schema.json").read_text()))


def schema_problems(docs: list[Tree]) -> list[str]:
    """What is wrong by the strict schemas of every kind."""
    import kubernetes_validate

    found = []
    for tree in docs:
        name = f"{tree['kind']} {tree['metadata']['name']}"
        custom = CUSTOM.get((tree["apiVersion"], tree["kind"]))
        if custom:
            found += [f"{name}: {error.json_path}: {error.message[:200]}" for error in _validator(custom).iter_errors(tree)]
            continue
        try:
            kubernetes_validate.validate(tree, KUBERNETES, strict=True)
        except kubernetes_validate.ValidationError as error:
            found.append(f"{name}: {error.message[:200]}")
    return found
