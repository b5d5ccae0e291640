"""What is packed with a submitted run, and that the run finds it where it is unpacked."""

from __future__ import annotations

import json
import os
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import yaml
from clusters import free_port
from command import SMALL

from flowgrpo_ray import provenance, waiting
from flowgrpo_ray.cluster import package
from flowgrpo_ray.cluster.submit import load_for_job, prepare
from flowgrpo_ray.config import load
from flowgrpo_ray.errors import ConfigError
from flowgrpo_ray.preflight import check

RUN = {"name": "r", "dir": "s3://bucket/runs", "steps": 1}
CODE = ("flowgrpo_ray/", "actors/")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory, and no module of it left afterwards."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    known = set(sys.modules)
    yield folder
    for name in set(sys.modules) - known:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def write(folder: Path, **changes: object) -> str:
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump({**SMALL, "run": RUN, **changes}))
    return str(path)


def packed(path: str, *overrides: str, working_dir: Path | None = None, **options: object):
    config = load_for_job(path, list(overrides), working_dir)
    return prepare(config, working_dir=working_dir, **options)


def unpacked(submission, folder: Path) -> Path:
    submission.package.write(folder / "package.zip")
    with zipfile.ZipFile(folder / "package.zip") as archive:
        archive.extractall(folder / "job")
    return folder / "job"


def others(submission) -> set[str]:
    """The files that are not this package's code."""
    return {name for name in submission.package.files if not name.startswith(CODE)}


# The configuration and its files --------------------------------------------------------------------------------------

def test_the_run_reads_the_packed_prompts(here, tmp_path, monkeypatch):
    (here / "data").mkdir()
    (here / "data/words.txt").write_text('the word "SUN"\nthe word "SEA"\n')
    (here / "data/unused.txt").write_text("x\n")
    ready = packed(write(here, data={"train_prompts": "data/words.txt", "eval_prompts": "data/words.txt"}))
    assert others(ready) == {"flowgrpo_job/config.yaml", "flowgrpo_job/data.train_prompts/words.txt",
                             "flowgrpo_job/data.eval_prompts/words.txt"}
    job = unpacked(ready, tmp_path)
    (here / "data/words.txt").unlink()
    monkeypatch.chdir(job)
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    config = load("flowgrpo_job/config.yaml")
    assert config.data.train_prompts == str(job / "flowgrpo_job/data.train_prompts/words.txt")
    assert [record.prompt for record in check(config).train] == ['the word "SUN"', 'the word "SEA"']
    assert config.run.dir == RUN["dir"] and config.model.path == "builtin:tiny"


def test_equal_contents_make_equal_bytes(here, tmp_path):
    (here / "words.txt").write_text("a\n")
    config = write(here, data={"train_prompts": "words.txt"})
    for name in ("a", "b"):
        packed(config).package.write(tmp_path / name)
        os.utime(here / "words.txt", (1, 1))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    (here / "words.txt").write_text("b\n")
    packed(config).package.write(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() != (tmp_path / "b").read_bytes()


def test_only_a_run_of_the_tiny_model_gets_its_weights(here, tmp_path):
    tiny = packed(write(here))
    weights = "flowgrpo_ray/tiny/model/transformer/diffusion_pytorch_model.safetensors"
    assert weights in tiny.package.files
    real = packed(write(here), "model.path=/models/sd35")
    assert weights not in real.package.files and "flowgrpo_ray/tiny/words/train.txt" in real.package.files
    assert real.package.write(tmp_path / "real.zip") < 2**20
    assert not any("__pycache__" in name for name in tiny.package.files)


def test_what_is_only_on_the_cluster_is_left_to_the_job(here):
    ready = packed(write(here), "model.path=/models/sd35", "data.train_prompts=/data/words.txt")
    assert [note.split(" is ")[0] for note in ready.notes] == ["model.path /models/sd35", "data.train_prompts /data/words.txt"]
    with pytest.raises(ConfigError, match="data.train_prompts: no prompt file at .*wrods.txt"):
        packed(write(here), "data.train_prompts=wrods.txt")


def test_a_store_that_cannot_be_read_from_here_is_left_to_the_job(here, monkeypatch):
    monkeypatch.setattr(waiting.limits, "storage", 0.2)
    uri = f"s3://bucket/words.txt?endpoint_override=127.0.0.1:{free_port()}&scheme=http&allow_bucket_creation=false"
    ready = packed(write(here), f"data.train_prompts='{uri}'")
    assert "data.train_prompts is not checked here, but in the job: " in ready.notes[0]
    with pytest.raises(ConfigError, match="no store is named 's4'"):
        packed(write(here), "data.train_prompts=s4://bucket/words.txt")


def test_weights_are_not_packed(here, tmp_path):
    from flowgrpo_ray import tiny

    model = tmp_path / "model"
    model.symlink_to(tiny.model_dir())
    ready = packed(write(here), f"model.path={model}")
    assert others(ready) == {"flowgrpo_job/config.yaml"}
    assert ready.notes == [f"model.path {model} is not packed: it must be at this path on every node of the cluster, or in the "
                           "folder of --working-dir"]


def test_the_adapter_to_start_from_is_packed(here, tmp_path, monkeypatch):
    from diffusers import StableDiffusion3Pipeline

    from flowgrpo_ray.policies import lora

    key = "transformer.transformer_blocks.0.attn.to_q.lora_{}.weight"
    arrays = {key.format("A"): np.zeros((4, 64), np.float32), key.format("B"): np.zeros((64, 4), np.float32)}
    settings = lora.LoraSettings(4, 8.0, ("transformer_blocks.0.attn.to_q",))
    lora.save_adapter(here / "adapter", arrays, settings, StableDiffusion3Pipeline)
    ready = packed(write(here), "lora.init_from=adapter", "model.path=/models/sd35")
    monkeypatch.chdir(unpacked(ready, tmp_path))
    loaded, _ = lora.load_adapter(load("flowgrpo_job/config.yaml").lora.init_from)
    assert loaded.keys() == arrays.keys()


def test_a_relative_run_dir_is_rejected(here):
    with pytest.raises(ConfigError, match="working directory of this Ray job.*s3://BUCKET/runs.*gs://.*mounted on every node"):
        packed(write(here), "run.dir=runs")


# Code -----------------------------------------------------------------------------------------------------------------

def test_the_image_s_code_on_request(here):
    ready = packed(write(here), image_code=True)
    assert set(ready.package.files) == {"flowgrpo_job/config.yaml"}
    assert "image" in ready.package.code


def test_the_commit_travels_with_the_code(here, tmp_path):
    job = unpacked(packed(write(here)), tmp_path)
    assert provenance.commit(job / "flowgrpo_ray") == provenance.commit()


REWARD = "def score(images, prompts, metadata):\n    return [0.0] * len(images)\n"


def test_a_reward_of_ones_own_brings_what_it_imports_from_its_folder(here):
    (here / "mine.py").write_text(f"import json, helper\n{REWARD}    import lazy.deep\n")
    (here / "helper.py").write_text("from second import x\n")
    (here / "second.py").write_text("import helper\nx = 1\n")
    (here / "lazy").mkdir()
    (here / "lazy/deep.py").write_text("")
    (here / "stranger.py").write_text("")
    (here / "packed").mkdir()
    (here / "packed/__init__.py").write_text("")
    (here / "packed/table.json").write_text("{}")
    (here / "packed/inner.py").write_text(f"import second\n{REWARD}")
    rewards = {"mine": {"python": "mine:score"}, "inner": {"python": "packed.inner:score", "weight": 0},
               "jpeg_compressibility": {}, "installed": {"python": "statistics:mean", "weight": 0}}
    config = load_for_job(write(here, rewards=rewards), None, None)
    assert set(package.build(config).files) - set(package._our_code(True)) == {
        "mine.py", "helper.py", "second.py", "lazy/deep.py", "packed/__init__.py", "packed/table.json", "packed/inner.py",
        "flowgrpo_job/config.yaml", "flowgrpo_ray/commit.json"}


# A whole folder -------------------------------------------------------------------------------------------------------

def test_a_whole_folder_without_what_is_to_be_left_out(here, tmp_path):
    folder = tmp_path / "project"
    keep = ["rewards/a.py", "rewards/table.json", "docs/x.md"]
    drop = [".git/config", ".venv/x", "runs/r/config.yaml", "rewards/__pycache__/a.pyc", "big/model.safetensors", "secret.txt",
            "docs/private/y.md", "data/huge.csv"]
    for name in (*keep, *drop, "model/unet.safetensors"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    (folder / ".gitignore").write_text("secret.txt\n")
    (folder / "docs/.gitignore").write_text("private/\n")
    (folder / ".rayignore").write_text("/data\n")
    (folder / "words.txt").write_text("a\n")
    config = write(here, data={"train_prompts": str(folder / "words.txt")})
    ready = packed(config, working_dir=folder)
    assert others(ready) == {*keep, ".gitignore", "docs/.gitignore", ".rayignore", "words.txt", "flowgrpo_job/config.yaml"}
    assert load_of(ready)["data"]["train_prompts"] == "./words.txt"
    loaded = load_for_job(config, None, folder)
    loaded.model.path = str(folder / "model")
    built = package.build(loaded, working_dir=folder)
    assert "model/unet.safetensors" in built.files, "weights that the configuration names"


def load_of(submission) -> dict:
    return yaml.safe_load(submission.package.files[package.CONFIG_FILE])


def test_too_large_a_package_names_its_largest_files(here, tmp_path, monkeypatch):
    folder, random = tmp_path / "project", np.random.default_rng(0)
    folder.mkdir()
    for name, size in (("a.dat", 300_000), ("b.dat", 700_000), ("c.dat", 500_000), ("d.dat", 100_000)):
        (folder / name).write_bytes(random.bytes(size))
    ready = packed(write(here), image_code=True, working_dir=folder)
    monkeypatch.setattr(package, "LARGEST", 2**20)
    with pytest.raises(ConfigError, match=r"more than 1 MiB; its largest files are b.dat \(0.7 MiB\), c.dat \(0.5 MiB\), "
                                          r"a.dat \(0.3 MiB\)\."):
        ready.package.write(tmp_path / "package.zip")


def test_the_metadata_is_text_and_the_grace_fits(here):
    ready = packed(write(here), "run.grace_s=60")
    assert ready.metadata.keys() == {"run", "run_dir", "commit", "dirty"}
    assert packed(write(here), "run.dir=s3://key:secret@bucket/runs").metadata["run_dir"] == "s3://***@bucket/runs/r"
    assert ready.metadata["run_dir"] == "s3://bucket/runs/r" and ready.metadata["dirty"] in ("true", "false")
    assert json.dumps(ready.metadata) and int(ready.env_vars["RAY_JOB_STOP_WAIT_TIME_S"]) > 60
