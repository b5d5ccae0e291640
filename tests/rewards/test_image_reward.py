import importlib.util
import json
import logging
import shutil
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from flowgrpo_ray import rewards
from flowgrpo_ray.rewards import RewardError, image_reward, image_reward_package
from flowgrpo_ray.rewards.image_reward_package import ALIAS, INSTALL

if importlib.util.find_spec("ImageReward") is None:
    pytest.skip(f"image-reward is not installed: {INSTALL}", allow_module_level=True)

import tiny_image_reward  # noqa: E402
from tiny_image_reward import noise  # noqa: E402

PROMPTS = ["a plain red image", "cats, dogs", "a dog", "a plain red image", "image of a word"]


@pytest.fixture(scope="module", autouse=True)
def small():
    """The package's models with a small vision tower; what importing them leaves behind."""
    before = list(warnings.filters), transformers.logging.get_verbosity()
    _, parts = tiny_image_reward.package()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "create_vit", tiny_image_reward.small_vit)
        yield before, (list(warnings.filters), transformers.logging.get_verbosity())


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    return tiny_image_reward.save(tmp_path_factory.mktemp("image_reward"))


@pytest.fixture(scope="module")
def reward(options):
    return rewards.get("image_reward", **options)


@pytest.fixture
def copy(options, tmp_path):
    """The options of a copy of the files that a test may damage."""
    folder = shutil.copytree(Path(options["weights"]).parent, tmp_path / "copy")
    return {"weights": str(folder / "ImageReward.pt"), "tokenizer": str(folder / "bert")}


def scores(reward, images, prompts):
    return reward.score(images, prompts, [{}] * len(prompts))["image_reward"]


# Scores ---------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("height", "width"), [(40, 56), (224, 224), (300, 120), (512, 512)])
def test_scores_are_the_packages_own(reward, height, width):
    images = noise(5, height, width)
    wanted = [reward._model.score(prompt, Image.fromarray(image)) for prompt, image in zip(PROMPTS, images, strict=True)]
    got = scores(reward, images, PROMPTS)
    assert got.dtype == np.float32 and got.shape == (5,)
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    assert len(set(got.tolist())) == 5


def test_scores_of_one_prompt_are_the_packages_ranking(reward):
    _, wanted = reward._model.inference_rank(PROMPTS[0], [Image.fromarray(image) for image in noise(4)])
    np.testing.assert_allclose(scores(reward, noise(4), [PROMPTS[0]] * 4), wanted, atol=1e-5)


@pytest.mark.parametrize("per_pass", [1, 2, 3, 5, 8])
def test_batches_change_nothing(options, reward, per_pass):
    other = rewards.get("image_reward", **options)
    other.per_pass = per_pass  # as on a GPU, where batch_size says it
    np.testing.assert_allclose(scores(other, noise(5), PROMPTS), scores(reward, noise(5), PROMPTS), atol=1e-5)
    assert other._places_agree()


def test_bits_do_not_depend_on_the_batch(reward):
    together = scores(reward, noise(5), PROMPTS)
    alone = [scores(reward, noise(5)[i : i + 1], PROMPTS[i : i + 1])[0] for i in range(5)]
    assert together.tolist() == alone
    assert scores(reward, noise(5)[::-1], PROMPTS[::-1]).tolist() == alone[::-1]


def test_prompt_and_image_both_count(reward):
    image = noise(1)
    assert scores(reward, image, ["a red image"]) != scores(reward, image, ["a blue image"])
    assert scores(reward, image, ["a red image"]) != scores(reward, image // 2, ["a red image"])


def test_prompts_are_cut_at_35_tokens(reward):
    long = "word " * 33  # and a start and an end
    assert scores(reward, noise(1), [long]) == scores(reward, noise(1), [f"{long} red dog"])
    assert scores(reward, noise(1), [long]) != scores(reward, noise(1), [f"dog {long}"])


@pytest.mark.parametrize(("height", "width"), [(224, 224), (40, 56), (301, 100), (100, 333), (16, 16)])
def test_preprocessing_is_resize_crop_scale_normalise(height, width):
    image = noise(1, height, width)[0]
    scale = 224 / min(height, width)
    size = (224 if width <= height else int(width * scale), 224 if height <= width else int(height * scale))
    resized = Image.fromarray(image).resize(size, Image.Resampling.BICUBIC)
    left, top = round((resized.width - 224) / 2), round((resized.height - 224) / 2)
    pixels = np.asarray(resized, np.float64)[top : top + 224, left : left + 224] / 255
    wanted = (pixels - [0.48145466, 0.4578275, 0.40821073]) / [0.26862954, 0.26130258, 0.27577711]
    got = image_reward.preprocess(Image.fromarray(image))
    assert got.shape == (3, 224, 224) and got.dtype == np.float32
    np.testing.assert_allclose(got, wanted.transpose(2, 0, 1), atol=1e-5)


def test_red_stays_red(reward, monkeypatch):
    seen = []
    own = reward._model.blip.visual_encoder.forward
    monkeypatch.setattr(reward._model.blip.visual_encoder, "forward", lambda x: seen.append(x) or own(x))
    red = np.zeros((1, 30, 30, 3), np.uint8)
    red[..., 0] = 255
    scores(reward, red, ["a"])
    np.testing.assert_allclose(seen[0][0, :, 100, 100], [(1 - 0.48145466) / 0.26862954, -0.4578275 / 0.26130258,
                                                         -0.40821073 / 0.27577711], atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(options, reward, dtype):
    other = rewards.get("image_reward", dtype=dtype, **options)
    assert {weight.dtype for weight in other._model.blip.parameters()} == {getattr(torch, dtype)}
    assert {weight.dtype for weight in other._model.mlp.parameters()} == {torch.float32}
    np.testing.assert_allclose(scores(other, noise(3), PROMPTS[:3]), scores(reward, noise(3), PROMPTS[:3]), atol=0.1)


def test_self_test_tells_a_model_from_its_opposite(copy):
    path = Path(copy["weights"])
    passed = []
    for sign in (1, -1):
        state = torch.load(path, weights_only=True)
        state["mlp.layers.7.weight"] *= sign
        torch.save(state, path)
        try:
            rewards.get("image_reward", **copy).self_test()
            passed.append(True)
        except RewardError as error:
            assert "known images should score from high to low" in str(error)
            passed.append(False)
    assert sorted(passed) == [False, True]


# Files ----------------------------------------------------------------------------------------------------------------

def changed(copy, change):
    state = torch.load(copy["weights"], weights_only=True)
    change(state)
    torch.save(state, copy["weights"])
    with pytest.raises(RewardError) as error:
        rewards.get("image_reward", **copy)
    assert "option weights" in str(error.value)
    return str(error.value)


def test_missing_keys_are_named(copy):
    key = "blip.text_encoder.encoder.layer.1.crossattention.self.query.weight"
    assert f"missing {key}" in changed(copy, lambda state: state.pop(key))


def test_unexpected_keys_are_named(copy):
    assert "unexpected blip.other.weight" in changed(
        copy, lambda state: state.update({"blip.other.weight": torch.zeros(2)}))


def test_other_shapes_are_named(copy):
    assert "mlp.layers.7.weight [2, 16] instead of [1, 16]" in changed(
        copy, lambda state: state.update({"mlp.layers.7.weight": torch.zeros(2, 16)}))


def test_positions_are_no_weights(copy, reward):
    state = torch.load(copy["weights"], weights_only=True)
    del state["blip.text_encoder.embeddings.position_ids"]
    torch.save(state, copy["weights"])
    assert scores(rewards.get("image_reward", **copy), noise(1), ["a"]) == scores(reward, noise(1), ["a"])


def refused(options, message, **more):
    with pytest.raises(RewardError) as error:
        rewards.get("image_reward", **options | more)
    assert message in str(error.value), error.value


def test_files_that_are_not_there(options, copy, tmp_path):
    refused(options, "option weights: there is no file", weights=str(tmp_path / "no.pt"))
    refused(options, "option weights: 'nobody/nothing/no.pt' cannot be loaded", weights="nobody/nothing/no.pt")
    refused(options, "option tokenizer: 'nobody/nothing' cannot be loaded as a BERT tokenizer", tokenizer="nobody/nothing")
    refused(options, "option med_config: there is no file", med_config=str(tmp_path / "no.json"))
    (Path(copy["weights"]).parent / "med_config.json").rename(tmp_path / "elsewhere.json")
    refused(copy, "name it with option med_config")
    assert rewards.get("image_reward", **copy, med_config=str(tmp_path / "elsewhere.json"))


def test_configurations_that_do_not_belong_to_the_model(options, tmp_path):
    path = tmp_path / "med.json"
    path.write_text("[]")
    refused(options, "is no configuration of BERT", med_config=str(path))
    path.write_text(json.dumps(tiny_image_reward.MED_CONFIG | {"hidden_size": 96}))
    refused(options, "has hidden_size 96; the published head takes 768", med_config=str(path))
    path.write_text(json.dumps(tiny_image_reward.MED_CONFIG | {"vocab_size": 19}))
    refused(options, "has 20 tokens, and the model", med_config=str(path))


def test_a_tokenizer_without_words(options, copy):
    (Path(copy["tokenizer"]) / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n")
    refused(options, "cannot be loaded as a BERT tokenizer (ValueError: it makes all words alike)", tokenizer=copy["tokenizer"])


# The package ----------------------------------------------------------------------------------------------------------

def test_importing_the_package_leaves_nothing_behind(small):
    before, after = small
    assert before == after
    assert "ImageReward" not in sys.modules  # its __init__ has not run
    if importlib.util.find_spec("torchvision") is None:
        assert not {"torchvision", "timm", "fairscale"} & set(sys.modules)
        assert not hasattr(transformers.modeling_utils, "find_pruneable_heads_and_indices")


@pytest.fixture
def not_imported(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == ALIAS]:
        monkeypatch.delitem(sys.modules, name)


def test_without_the_package_the_error_says_how_to_install_it(options, not_imported, monkeypatch):
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if not (Path(folder) / "ImageReward").is_dir()])
    refused(options, f"needs the package image-reward: {INSTALL}")


def test_another_package_of_that_name(options, not_imported, monkeypatch, tmp_path):
    (tmp_path / "ImageReward").mkdir()
    (tmp_path / "ImageReward" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    refused(options, f"package image-reward in {tmp_path / 'ImageReward'} cannot be imported (ModuleNotFoundError")
    assert not [name for name in sys.modules if name.partition(".")[0] == ALIAS]


def test_what_is_there_is_used(not_imported, monkeypatch, tmp_path, caplog):
    """A torchvision that can be imported is not stood in for, and is still there afterwards."""
    caplog.set_level(logging.INFO)
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("")
    (tmp_path / "torchvision" / "transforms.py").write_text(
        "class Compose:\n    def __init__(self, steps):\n        self.steps = steps\n"
        "Resize = CenterCrop = Normalize = lambda *args, **kwargs: None\nToTensor = lambda: None\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    module, _ = image_reward_package.load(lambda image: None)
    assert type(module._transform(224)).__module__ == "torchvision.transforms"
    assert "does without timm" in caplog.text and "does without torchvision" not in caplog.text
    for name in ("torchvision", "torchvision.transforms"):
        monkeypatch.delitem(sys.modules, name)
