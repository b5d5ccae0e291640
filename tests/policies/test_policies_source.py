"""Where a model comes from: every wrong path is named before a weight is loaded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from huggingface_hub.errors import HfHubHTTPError

from flowgrpo_ray import hub, waiting
from flowgrpo_ray.config.schema import ModelConfig
from flowgrpo_ray.errors import ConfigError, DeadlineError, HubError
from flowgrpo_ray.policies import check_model, load_policy
from flowgrpo_ray.policies.flux import FluxPolicy
from flowgrpo_ray.policies.sd3 import SD3Policy
from flowgrpo_ray.policies.source import ModelSource, find


def test_families_are_read_from_the_index(folders):
    assert find(ModelConfig(path="builtin:tiny")).family == "sd3"
    assert find(ModelConfig(path=folders("sd3_t5"))).family == "sd3"
    assert find(ModelConfig(path=folders("flux_dev"))).family == "flux"
    assert isinstance(load_policy(ModelConfig(path=folders("sd3_t5")), parts="learner"), SD3Policy)
    assert isinstance(load_policy(ModelConfig(path=folders("flux_dev")), parts="learner"), FluxPolicy)


def index_folder(folder: Path, text: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "model_index.json").write_text(text)
    return str(folder)


@pytest.mark.parametrize("check", [check_model, load_policy])
def test_wrong_paths_are_named(tmp_path, folders, check):
    base = folders("sd3_no_t5")
    (tmp_path / "empty").mkdir()
    (tmp_path / "weights.bin").write_bytes(b"")
    cases = [
        ({"path": "builtin:tinny"}, "did you mean builtin:tiny"),
        ({"path": str(tmp_path / "emty")}, r"no such folder.*did you mean .*empty\?"),
        ({"path": str(tmp_path / "empty")}, "folder without model_index.json"),
        ({"path": f"{base}/transformer"}, f"folder without model_index.json.*did you mean {base}"),
        ({"path": str(tmp_path / "weights.bin")}, "is a file"),
        ({"path": "s3://bucket/model"}, "s3://bucket/model.*no such folder"),
        ({"path": index_folder(tmp_path / "xl", '{"_class_name": "StableDiffusionXLPipeline"}')},
         r"StableDiffusionXLPipeline.*StableDiffusion3Pipeline \(sd3\), FluxPipeline \(flux\)"),
        ({"path": index_folder(tmp_path / "odd", "not json")}, "not valid JSON"),
        ({"path": base, "family": "flux"}, "set model.family to sd3 or auto"),
        ({"path": base, "max_sequence_length": 513}, "the longest is 512"),
    ]
    for options, message in cases:
        with pytest.raises(ConfigError, match=message) as caught:
            check(ModelConfig(**options))
        assert "max_sequence_length" in options or "model." in str(caught.value)


def test_a_missing_component_folder_and_a_broken_weight_file_are_named(tmp_path, folders):
    copy = tmp_path / "copy"
    shutil.copytree(folders("sd3_no_t5"), copy)
    shutil.rmtree(copy / "vae")
    with pytest.raises(ConfigError, match="model_index.json names vae"):
        check_model(ModelConfig(path=str(copy)))
    index = json.loads((copy / "model_index.json").read_text())
    (copy / "model_index.json").write_text(json.dumps({**index, "vae": [None, None]}))
    with pytest.raises(ConfigError, match="the pipeline lacks vae"):
        load_policy(ModelConfig(path=str(copy)))
    broken = tmp_path / "broken"
    shutil.copytree(folders("sd3_no_t5"), broken)
    (broken / "transformer" / "diffusion_pytorch_model.safetensors").write_bytes(b"truncated")
    with pytest.raises(ConfigError, match="broken' cannot be loaded"):
        load_policy(ModelConfig(path=str(broken)))


def test_a_variant_that_is_not_there_is_an_error(folders):
    with pytest.raises(ConfigError, match="variant=fp16"):
        load_policy(ModelConfig(path=folders("sd3_no_t5"), variant="fp16"))


def test_checking_imports_no_diffusers_and_an_unreachable_hub_is_named(tmp_path):
    script = """
import sys
from flowgrpo_ray.config.schema import ModelConfig
from flowgrpo_ray import hub, waiting
from flowgrpo_ray.errors import ConfigError, DeadlineError, HubError
from flowgrpo_ray.policies import check_model
check_model(ModelConfig(path="builtin:tiny"))
try:
    check_model(ModelConfig(path="some-owner/some-model"))
except ConfigError as error:
    print(error)
print("diffusers" in sys.modules, "transformers" in sys.modules)
"""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True).stdout
    message, modules = out.strip().splitlines()
    assert "'some-owner/some-model' is unreachable" in message and "no such folder" in message
    assert modules == "False False"


def test_a_hub_that_cannot_be_reached_did_not_answer():
    request = httpx.Request("GET", "https://hub")
    down = HfHubHTTPError("502 Bad Gateway", response=httpx.Response(502, request=request))
    for error, text in ((httpx.ConnectError("[Errno -2] no such host"), r"could not be reached \(\[Errno -2\] no such host\)"),
                        (down, "answered 502 Bad Gateway")):
        with pytest.raises(HubError, match=f"the hub {text}"), hub.explained("model.path 'a/b'", "a/b", None, "none"):
            raise error


def test_a_model_of_the_hub_is_fetched_within_a_deadline(monkeypatch, folders):
    calls, over, model = [], threading.Event(), ModelConfig(path="owner/model", revision="v1")
    index = {name: ["diffusers", "x"] for name in (*SD3Policy.encoders, "vae", "transformer", "scheduler")}
    monkeypatch.setattr("flowgrpo_ray.policies.base.find", lambda model: ModelSource("owner/model", "sd3", index, False))
    monkeypatch.setattr(SD3Policy.pipeline_class, "download", lambda *args, **options: calls.append((args, options)))
    SD3Policy.fetch(model)
    (args, options), = calls
    assert args == ("owner/model",) and options["revision"] == "v1" and options["image_encoder"] is None
    monkeypatch.setattr(SD3Policy.pipeline_class, "download", lambda *args, **options: over.wait())
    monkeypatch.setattr(waiting.limits, "hub", 0.1)
    with pytest.raises(DeadlineError, match=r"no answer from owner/model from the Hugging Face Hub within 0.1 s"):
        SD3Policy.fetch(model)
    over.set()
    monkeypatch.undo()
    SD3Policy.fetch(ModelConfig(path=folders("sd3_no_t5")))  # a folder is not fetched
