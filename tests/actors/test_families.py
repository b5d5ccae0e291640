"""One training step on real actors for every kind of pipeline, and its adapter in the stock pipeline."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from runs import run, small_config
from tiny_pipelines import build

from flowgrpo_ray.data.plan import noise_seed
from flowgrpo_ray.policies import load_policy
from flowgrpo_ray.run_dir import checkpoint
from flowgrpo_ray.run_dir.checkpoint import latest
from flowgrpo_ray.sampling.noise import draw

pytestmark = pytest.mark.usefixtures("ray_cluster")

SIZE = {"sampling.height": 32, "sampling.width": 48, "sampling.num_steps": 3, "sampling.window": {"size": 2, "range": [0, 2]},
        "sampling.groups_per_step": 2, "train.updates_per_step": 1, "loss.beta": 0.01, "lora.rank": None}
KINDS = {
    "sd3_t5": {"model.max_sequence_length": 8},
    "sd3_no_t5": {"model.max_sequence_length": 8, "model.use_t5": False},
    "sd3_cfg": {"model.max_sequence_length": 8, "sampling.guidance_scale": 3.0, "data.negative_prompt": "a bad 1"},
    "flux_dev": {"model.max_sequence_length": 8, "sampling.guidance_scale": 3.5, "sampling.kernel": "cps",
                 "sampling.log_prob": "unscaled", "loss.kl": "velocity"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("families")


@pytest.mark.parametrize("name", KINDS)
def test_train_export_reload(name, folder):
    model = build("sd3_t5" if name == "sd3_cfg" else name, folder / f"model-{name}")
    config = small_config(folder, name, steps=1, overrides={"model": {"path": str(model)}, **SIZE, **KINDS[name]})
    finished = run(config)
    row = finished.rows[0]
    assert row["first_update_log_ratio_max"] == 0.0
    assert row["updates"] == 1
    assert row["adapter_norm"] > 0 and row["grad_norm"] > 0

    policy = load_policy(config.model)
    pipeline, info = policy.pipeline, latest(finished.run_dir)
    adapter = folder / f"adapter-{name}"
    adapter.mkdir()
    (adapter / "pytorch_lora_weights.safetensors").write_bytes(
        checkpoint.read_file(info, "adapter/pytorch_lora_weights.safetensors"))
    before = _image(pipeline, policy, config)
    pipeline.load_lora_weights(str(adapter))
    peft_config = pipeline.transformer.peft_config["default_0"]
    rank, alpha = (32, 64) if policy.family == "sd3" else (64, 128)
    assert (peft_config.r, peft_config.lora_alpha) == (rank, alpha)
    loaded = {key for key, _ in pipeline.transformer.named_parameters() if "lora_" in key}
    assert len(loaded) == len(finished.adapter), "every key of the file is used"
    after = _image(pipeline, policy, config)
    assert np.abs(after - before).max() > 1e-4, "the adapter changes the image"

    ours = _ours(config, finished.adapter)
    np.testing.assert_allclose(after, ours, atol=1e-5, rtol=0)


def _latents(policy, config):
    s = config.sampling
    return draw([noise_seed(1, 0, 0, 0, "eval", -1)], policy.latent_shape(s.height, s.width))


def _image(pipeline, policy, config) -> np.ndarray:
    """The stock pipeline's own image from our initial noise."""
    s = config.sampling
    negative = {"negative_prompt": [config.data.negative_prompt]} if policy.family == "sd3" else {}
    with torch.no_grad():
        return pipeline(
            prompt=['the word "ab"'], height=s.height, width=s.width, num_inference_steps=4, guidance_scale=s.guidance_scale,
            max_sequence_length=config.model.max_sequence_length, latents=_latents(policy, config), output_type="np",
            **negative,
        ).images


def _ours(config, arrays) -> np.ndarray:
    """Our sampler's image with the trained adapter: what `flowgrpo-ray sample` makes."""
    from flowgrpo_ray.data.prompts import PromptRecord
    from flowgrpo_ray.data.trajectory import SampleRequest
    from flowgrpo_ray.policies import lora
    from flowgrpo_ray.sampling.sampler import Sampler

    policy = load_policy(config.model)
    lora.attach(policy, config.lora, 0)
    sampler = Sampler(policy, config)
    sampler.slots.load("policy", 1, arrays)
    s = config.sampling
    request = SampleRequest(run_id="x", slot="policy", version=1, noise_keys=((1, 0, 0, 0),), stream="eval", index=(0,),
                            height=s.height, width=s.width, num_steps=4, guidance_scale=s.guidance_scale, window=(0, 0))
    negative = sampler.encode(PromptRecord(config.data.negative_prompt)) if s.guidance_scale > 1 else None
    x, _ = sampler.denoise(request, "", negative, sampler.encode(PromptRecord('the word "ab"')))
    with torch.no_grad():
        return policy.decode_float(x, s.height, s.width).permute(0, 2, 3, 1).numpy()
