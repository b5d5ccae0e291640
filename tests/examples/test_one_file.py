"""The one-file example computes what the library computes, and what a run on Ray computes (see test_invariants)."""

from __future__ import annotations

import sys

import flow_grpo_one_file as example
import pytest
from reference import JPEG, RECORDS, small, train_reference
from runs import assert_same_bits

from flowgrpo_ray.policies.lora import load_adapter
from flowgrpo_ray.rewards import get


@pytest.mark.parametrize("sections", [
    {},
    {"sampling": {"guidance_scale": 3.0}, "loss": {"beta": 0.04}, "train": {"updates_per_step": 2}},
    {"sampling": {"kernel": "cps", "noise_level": 0.7, "micro_batch": 4, "batch_groups": 2, "window": {"size": 2}}},
], ids=["plain", "guidance and KL", "cps over two groups"])
def test_the_adapter_is_that_of_the_library(sections):
    config = small(**sections)
    assert not list(example.unsupported(config))
    trainer = example.Trainer(config, {JPEG: get(JPEG)})
    for step in range(2):
        trainer.step(RECORDS, step)
    adapter, ema, _ = train_reference(config, RECORDS, 2, get(JPEG))
    assert_same_bits(trainer.adapter(), adapter)
    assert_same_bits(trainer.ema_adapter(), ema)


def test_the_command_writes_an_adapter(tmp_path, monkeypatch, capsys):
    overrides = ["rewards={jpeg_compressibility: {}}", "pools.reward={}", "sampling.groups_per_step=1", "sampling.group_size=2",
                 "sampling.micro_batch=2", "sampling.num_steps=4", "train.updates_per_step=1"]
    monkeypatch.setattr(sys, "argv", ["example", "configs/tiny_ocr.yaml", *overrides, "--steps", "1",
                                      "--out", str(tmp_path / "adapter")])
    example.main()
    assert capsys.readouterr().out.startswith("step 1  reward ")
    arrays, settings = load_adapter(tmp_path / "adapter")
    assert arrays and settings.rank == 32


@pytest.mark.parametrize(("override", "message"), [
    ("advantage.std=global", "advantage.std: global: not in this file; use flowgrpo-ray train"),
    ("advantage.sdt=group", "advantage.sdt")])
def test_a_setting_that_the_file_does_not_have_is_named(monkeypatch, capsys, override, message):
    monkeypatch.setattr(sys, "argv", ["example", "configs/tiny_ocr.yaml", override])
    with pytest.raises(SystemExit):
        example.main()
    assert message in capsys.readouterr().err
