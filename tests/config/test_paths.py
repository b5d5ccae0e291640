"""Paths are absolute once a configuration is loaded; names and URIs stay as they are."""

from __future__ import annotations

import pytest

from flowgrpo_ray.config.load import from_tree, load
from flowgrpo_ray.config.schema import PATH, PATH_OR_NAME, Section, marks_of
from flowgrpo_ray.errors import ConfigError
from flowgrpo_ray.run_dir.recorder import Recorder

OCR = "rewards.ocr.weight=1"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    return tmp_path


def value(config, key):
    for part in key.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


@pytest.mark.parametrize("key", ["run.dir", "model.path", "lora.init_from", "data.train_prompts", "data.eval_prompts",
                                 "rewards.ocr.options.rec_model_dir"])
def test_a_relative_path_is_one_of_the_working_directory(here, key, monkeypatch):
    (here / "sub").mkdir()
    assert value(load(None, [OCR, f"{key}=sub"]), key) == str(here / "sub")
    assert value(load(None, [OCR, f"{key}=./gone/../sub"]), key) == str(here / "sub")
    monkeypatch.setenv("HOME", "/home/x")
    assert value(load(None, [OCR, f"{key}=~/a"]), key) == "/home/x/a"
    for uri in ("s3://bucket/a?region=x", "gs://bucket/a", "file:///a/b", "builtin:tiny"):
        assert value(load(None, [OCR, f"{key}='{uri}'"]), key) == uri


def test_the_default_run_dir_too(here):
    assert load(None, [OCR]).run.dir == str(here / "runs")


def test_a_hub_name_is_a_path_only_if_such_a_folder_is_there(here):
    name = "stabilityai/stable-diffusion-3.5-medium"
    assert load(None, [OCR, f"model.path={name}"]).model.path == name
    assert load(None, ["rewards.clipscore.options.model=openai/clip"]).rewards["clipscore"].options == {"model": "openai/clip"}
    (here / name).mkdir(parents=True)
    assert load(None, [OCR, f"model.path={name}"]).model.path == str(here / name)


def test_only_options_that_are_paths_change(here):
    (here / "full").mkdir()
    options = load(None, [OCR, "rewards.ocr.options={mode: full, det_model_dir: full}"]).rewards["ocr"].options
    assert options == {"mode": "full", "det_model_dir": str(here / "full")}


def test_a_tree_that_an_actor_gets_is_taken_as_it_is(here):
    tree = load(None, [OCR]).model_dump(mode="json")
    tree["data"]["train_prompts"] = "x.txt"
    assert from_tree(tree).data.train_prompts == "x.txt"


def test_every_field_that_says_folder_or_file_is_marked():
    def unmarked(section, prefix=""):
        for name, field in section.model_fields.items():
            kind = field.annotation
            if isinstance(kind, type) and issubclass(kind, Section):
                yield from unmarked(kind, f"{prefix}{name}.")
            elif kind in (str, str | None) and ("older" in field.description or " file" in field.description) and not {
                    PATH, PATH_OR_NAME} & marks_of(section, name):
                yield f"{prefix}{name}"

    from flowgrpo_ray.config import Config

    assert set(unmarked(Config)) <= {"model.variant"}


# In a job -------------------------------------------------------------------------------------------------------------

@pytest.fixture
def job(here, monkeypatch):
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    return here


@pytest.mark.parametrize("overrides", [[], ["run.dir=runs"], ["run.dir=./a/b"]])
def test_a_job_rejects_a_relative_run_dir(job, overrides):
    config = load(None, [OCR, *overrides, "data.train_prompts=words.txt"])
    assert config.data.train_prompts == str(job / "words.txt"), "the files that came with the job are there"
    with pytest.raises(ConfigError, match="working directory of this Ray job.*s3://BUCKET/runs.*gs://.*mounted on every node"):
        Recorder(config)
    assert list(job.iterdir()) == []


def test_a_job_rejects_the_folder_that_its_files_were_unpacked_into(job):
    folder = job / "runtime_resources" / "working_dir_files" / "_ray_pkg_0" / "runs"
    with pytest.raises(ConfigError, match="working directory of this Ray job"):
        Recorder(load(None, [OCR, f"run.dir={folder}"]))


def test_a_job_takes_an_absolute_one(job, tmp_path_factory):
    volume = tmp_path_factory.mktemp("volume")
    Recorder(load(None, [OCR, f"run.dir={volume}"])).close()
