"""`flowgrpo-ray fetch` against a hub of this machine: one download for each cache, whoever asks how often."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import FakeHub, folder_repo
from filelock import FileLock
from manifests import ROOT

from flowgrpo_ray import tiny, waiting
from flowgrpo_ray.cluster import fetch as fetching
from flowgrpo_ray.config.load import from_tree
from flowgrpo_ray.errors import DeadlineError
from flowgrpo_ray.rewards import known_rewards, reward_class
from flowgrpo_ray.rewards.base import settings_of

# Of equal contents the hub's cache downloads one.
CLIP = {"config.json": b"{}", "preprocessor_config.json": b"{ }", "tokenizer.json": b"{  }", "merges.txt": b"a b\n",
        "model.safetensors": b"s" * 1000, "pytorch_model.bin": b"b" * 1000, "flax_model.msgpack": b"f", "README.md": b"r",
        "onnx/model.onnx": b"o"}
PROCESSOR = {"preprocessor_config.json": b"{}", "tokenizer.json": b"{ }", "pytorch_model.bin": b"b" * 1000}
PICKSCORE = ["rewards.ocr=null", "rewards.pickscore={options: {model: me/pick, processor: me/clip}}"]


def start(hub: FakeHub, home: Path, *args: str) -> subprocess.Popen[str]:
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    return subprocess.Popen([sys.executable, "-m", "flowgrpo_ray.cli", "fetch", "configs/tiny_ocr.yaml", *args], env=env,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def run(hub: FakeHub, home: Path, *args: str) -> tuple[int, str, str]:
    process = start(hub, home, *args)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def test_many_processes_on_one_cache_download_once(tmp_path) -> None:
    with FakeHub({"me/pick": CLIP, "me/clip": PROCESSOR}) as hub:
        processes = [start(hub, tmp_path, *PICKSCORE, "--only", "rewards") for _ in range(4)]
        outs = [process.communicate(timeout=120) for process in processes]
        assert [process.returncode for process in processes] == [0] * 4, outs
        wanted = {("me/pick", name) for name in ("config.json", "preprocessor_config.json", "tokenizer.json", "merges.txt",
                                                 "model.safetensors")}
        wanted |= {("me/clip", name) for name in ("preprocessor_config.json", "tokenizer.json")}
        assert hub.downloads == dict.fromkeys(wanted, 1)
        # Nor does each of them ask for each file.
        asked = [line for line in hub.asked if line.startswith("HEAD")]
        assert len(asked) == len(wanted) == len(set(asked))
        assert sum(out.count("is fetched") for out, _ in outs) == 2 and sum(out.count("is there") for out, _ in outs) == 6
        # A branch that has moved on is fetched again, a file that has gone missing too; a commit is not asked about.
        hub.repos["me/clip"] = {**PROCESSOR, "tokenizer.json": b"{   }"}
        code, out, _ = run(hub, tmp_path, *PICKSCORE, "--only", "rewards")
        assert code == 0 and "me/pick is there" in out and "me/clip is fetched" in out
        assert hub.downloads["me/clip", "tokenizer.json"] == 2 and hub.downloads["me/pick", "model.safetensors"] == 1
        for file in tmp_path.glob("hub/models--me--pick/snapshots/*/model.safetensors"):
            file.resolve().unlink()
            file.unlink()
        pinned = [*PICKSCORE, f"rewards.pickscore.options.revision={hub.commit('me/pick')}", "--only", "rewards"]
        assert "is fetched" in run(hub, tmp_path, *pinned)[1] and hub.downloads["me/pick", "model.safetensors"] == 2
        before = sum("me/pick" in line for line in hub.asked)
        assert "is there" in run(hub, tmp_path, *pinned)[1] and sum("me/pick" in line for line in hub.asked) == before


def test_gated_and_missing_models_are_named_with_their_page(tmp_path) -> None:
    with FakeHub({"me/gated": CLIP}, gated={"me/gated"}) as hub:
        reward = ["rewards.ocr=null", "--only", "rewards"]
        started = {
            "model": start(hub, tmp_path, "model.path=me/gated"),
            "missing": start(hub, tmp_path, "model.path=me/none"),
            "reward": start(hub, tmp_path, "rewards.clipscore={options: {model: me/gated}}", *reward),
            "file": start(hub, tmp_path, "rewards.hpsv2={options: {checkpoint: me/gated/a.pt}}", *reward),
        }
        said = {name: process.communicate(timeout=120)[1] for name, process in started.items()}
        assert {name: process.returncode for name, process in started.items()} == dict.fromkeys(started, 2), said
        for name, setting in (("model", "model.path"), ("reward", "rewards.clipscore.options.model"),
                              ("file", "rewards.hpsv2.options.checkpoint")):
            assert f"{setting} 'me/gated'" in said[name] and f"licence, at {hub.url}/me/gated;" in said[name], said[name]
        assert f"no model of that name at {hub.url}/me/none" in said["missing"]
        assert not any("Traceback" in text for text in said.values())


@pytest.mark.slow
def test_fetched_model_loads_without_the_hub(tmp_path) -> None:
    with FakeHub({"me/tiny": folder_repo(Path(tiny.model_dir()))}) as hub:
        code, out, err = run(hub, tmp_path, "model.path=me/tiny")
        assert code == 0 and "model.path: me/tiny is fetched" in out and "Traceback" not in err
        assert max(hub.downloads.values()) == 1
    script = ("from flowgrpo_ray.policies import load_policy; from flowgrpo_ray.config.schema import ModelConfig; "
              "print(load_policy(ModelConfig(path='me/tiny', use_t5=False)).family)")
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    assert subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True,
                          cwd=ROOT).stdout.strip() == "sd3"


def test_waiting_for_another_process_has_a_deadline(tmp_path, monkeypatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(waiting.limits, "hub", 0.1)
    wanted = fetching.Wanted("model.path", "me/tiny", None)
    (tmp_path / fetching.FOLDER).mkdir()
    with FileLock(tmp_path / fetching.FOLDER / f"{wanted.key}.lock"), \
            pytest.raises(DeadlineError, match="another process has been fetching me/tiny .*run.hub_timeout_s"):
        fetching._once(wanted)


def test_local_models_need_nothing() -> None:
    lines = fetching.fetch(from_tree({"rewards": {"ocr": {}}}))
    assert lines == ["model.path: builtin:tiny is local", "rewards.ocr: nothing is on the hub"]


@pytest.mark.parametrize(("names", "weights", "wanted"), [
    (list(CLIP), True, {"config.json", "preprocessor_config.json", "tokenizer.json", "merges.txt", "model.safetensors"}),
    (list(CLIP), False, {"config.json", "preprocessor_config.json", "tokenizer.json", "merges.txt"}),
    (["config.json", "pytorch_model.bin", "tf_model.h5"], True, {"config.json", "pytorch_model.bin"}),
    (["model.safetensors.index.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
      "pytorch_model.bin.index.json", "pytorch_model-00001-of-00001.bin"], True,
     {"model.safetensors.index.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}),
])
def test_files_that_transformers_loads(names, weights, wanted) -> None:
    assert set(fetching.needed_files(names, weights=weights)) == wanted


def test_what_each_reward_loads_from_the_hub() -> None:
    def of(name: str, **options: object) -> set[tuple[str, bool]]:
        cls = reward_class(name)
        return {(source.name, source.weights) for source in cls.hub_sources(settings_of(cls, options))}

    clip_l, clip_h = "openai/clip-vit-large-patch14", "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    loading = {
        "pickscore": {("yuvalkirstain/PickScore_v1", True), (clip_h, False)},
        "clipscore": {(clip_l, True)},
        "image_similarity": {(clip_l, True)},
        "aesthetic": {(clip_l, True), ("trl-lib/ddpo-aesthetic-predictor/aesthetic-model.pth", True)},
        "hpsv2": {("xswu/HPSv2/HPS_v2.1_compressed.pt", True), (clip_h, False)},
        "image_reward": {("THUDM/ImageReward/ImageReward.pt", True), ("THUDM/ImageReward/med_config.json", True),
                         ("bert-base-uncased", False)},
    }
    assert {name: found for name in known_rewards() if (found := of(name))} == loading
    assert of("geneval", detector="me/detr") == {("me/detr", True), (clip_l, True)}
