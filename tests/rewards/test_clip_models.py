import io
import json
import shutil

import numpy as np
import pytest
import tiny_clip
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import CLIPModel, CLIPTokenizer
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from flowgrpo_ray import rewards
from flowgrpo_ray.rewards import RewardError, clip_models
from flowgrpo_ray.rewards.clip_models import Clip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_clip.build(tmp_path_factory.mktemp("clip"))


@pytest.fixture
def copy(folder, tmp_path):
    """A copy of the model folder that a test may damage."""
    return shutil.copytree(folder, tmp_path / "copy")


def noise(n, height=40, width=56, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, height, width, 3), np.uint8)


def clip_of(folder, **settings):
    return rewards.get("clipscore", model=str(folder), **settings).clip


def changed(folder, change):
    """Rewrite the weights of a folder."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


# Preprocessing and embeddings -----------------------------------------------------------------------------------------

@pytest.mark.parametrize(("height", "width"), [(32, 32), (40, 56), (100, 20), (16, 16)])
def test_preprocessing_is_resize_crop_scale_normalise(folder, height, width):
    image = noise(1, height, width)[0]
    preprocess = clip_models.published_preprocessing("clipscore", "model", str(folder), None, tiny_clip.SIZE)
    side = tiny_clip.SIZE
    scale = side / min(height, width)
    size = (side if width <= height else int(width * scale), side if height <= width else int(height * scale))
    resized = Image.fromarray(image).resize(size, Image.Resampling.BICUBIC)
    left, top = (resized.width - side) // 2, (resized.height - side) // 2
    pixels = np.asarray(resized.crop((left, top, left + side, top + side)), np.float64) / 255
    wanted = (pixels - [0.48145466, 0.4578275, 0.40821073]) / [0.26862954, 0.26130258, 0.27577711]
    got = preprocess(image)
    assert got.shape == (3, side, side) and got.dtype == np.float32
    np.testing.assert_allclose(got, wanted.transpose(2, 0, 1), atol=1e-5)


def test_red_stays_red(folder):
    preprocess = clip_models.published_preprocessing("clipscore", "model", str(folder), None, tiny_clip.SIZE)
    red = np.zeros((8, 8, 3), np.uint8)
    red[..., 0] = 255
    got = preprocess(red)
    assert (got[0] > 1.5).all() and (got[1:] < -1).all()


def test_embeddings_are_the_models_own(folder):
    images, prompts = noise(5), ["a red cat", "", "x" * 60]
    model = CLIPModel.from_pretrained(folder)
    pixels = CLIPImageProcessorPil.from_pretrained(folder)(images=[Image.fromarray(i) for i in images], return_tensors="pt")
    words = CLIPTokenizer.from_pretrained(folder)(prompts, padding=True, truncation=True, return_tensors="pt")
    assert words["input_ids"].shape == (3, tiny_clip.TOKENS)  # the longest is cut
    with torch.no_grad():
        out = model(**words, **pixels)
    clip = clip_of(folder)
    assert clip.dtype is torch.float32
    np.testing.assert_allclose(clip.images(images), out.image_embeds.numpy(), atol=2e-6)
    np.testing.assert_allclose(clip.texts(prompts), out.text_embeds.numpy(), atol=2e-6)
    np.testing.assert_allclose(np.linalg.norm(clip.images(images), axis=1), 1, atol=1e-12)
    assert clip.images(noise(0)).shape == (0, tiny_clip.WIDTH) == clip.texts([]).shape
    assert abs(clip.images(images) @ clip.images(images).T - 1)[0, 1:].min() > 1e-3  # images are told apart


def test_long_prompts_are_cut_at_the_text_tower(folder):
    clip = clip_of(folder)
    kept = "a" * (tiny_clip.TOKENS - 2)  # the letters of one word; start and end take two places
    assert np.array_equal(clip.text(kept + "bcd"), clip.text(kept + "xyz"))
    assert not np.array_equal(clip.text(kept[:-1] + "bcd"), clip.text(kept[:-1] + "xyz"))


@pytest.mark.parametrize("per_pass", [1, 4])
def test_bits_do_not_depend_on_the_batch(folder, per_pass):
    clip, images = clip_of(folder), noise(7)
    clip.per_pass = per_pass  # 4: what a GPU does
    assert clip.places_agree()
    together = clip.images(images)
    alone = np.concatenate([clip.images(images[i : i + 1]) for i in range(7)])
    turned = clip.images(images[::-1])[::-1]
    assert together.tobytes() == alone.tobytes() == turned.tobytes()
    np.testing.assert_allclose(together, clip_of(folder).images(images), atol=1e-6)


def test_a_batch_whose_places_differ_is_noticed(folder):
    clip = clip_of(folder)
    clip.per_pass = 4
    first = clip._pass

    def uneven(pixels):
        rows = first(pixels)
        rows[-1] = np.nextafter(rows[-1], np.inf, dtype=np.float32)
        return rows

    clip._pass = uneven
    assert not clip.places_agree()


def test_what_the_model_notes_is_the_rewards_note(folder, monkeypatch):
    monkeypatch.setattr(clip_models.Clip, "notes", ("one by one",))
    assert rewards.get("clipscore", model=str(folder)).notes == ("one by one",)


def test_each_prompt_is_embedded_once_and_by_itself(folder):
    clip = clip_of(folder)
    seen = clip.text.cache_info().misses  # the check of the tokenizer
    first = clip.texts(["cat", "dog", "cat", "cat"])
    assert clip.text.cache_info().misses == seen + 2
    again = clip.texts(["dog", "cat"])
    assert clip.text.cache_info().misses == seen + 2
    assert again.tobytes() == first[[1, 0]].tobytes() == clip_of(folder).texts(["dog", "cat"]).tobytes()
    assert clip.text.cache_info().maxsize == clip_models.CACHED_TEXTS


def test_dtypes(folder):
    full = clip_of(folder, dtype="float32")
    for dtype, tolerance in (("bfloat16", 0.1), ("float16", 0.02)):
        half = clip_of(folder, dtype=dtype)
        assert half.dtype is getattr(torch, dtype)
        difference = np.abs(half.images(noise(3)) - full.images(noise(3))).max()
        assert 0 < difference < tolerance
        assert half.logit_scale == full.logit_scale == pytest.approx(np.exp(2.6592), rel=1e-6)  # not rounded to half precision


# What is refused ------------------------------------------------------------------------------------------------------

def refused(folder, **settings):
    with pytest.raises(RewardError) as error:
        clip_of(folder, **settings)
    return str(error.value)


def test_missing_keys_are_named(copy):
    changed(copy, lambda w: [w.pop("visual_projection.weight"), w.pop("text_model.encoder.layers.1.mlp.fc1.bias")])
    text = refused(copy)
    assert "reward clipscore: option model" in text
    assert "missing text_model.encoder.layers.1.mlp.fc1.bias, visual_projection.weight" in text


def test_unexpected_keys_are_named(copy):
    changed(copy, lambda w: w.update({"score_head.weight": torch.zeros(2), "extra": torch.zeros(1)}))
    assert "unexpected extra, score_head.weight" in refused(copy)


def test_other_shapes_are_named(copy):
    changed(copy, lambda w: w.update({"visual_projection.weight": torch.zeros(4, 32)}))
    assert "of another shape visual_projection.weight [4, 32] instead of [20, 32]" in refused(copy)


def test_positions_that_old_checkpoints_store_are_no_weights(copy, folder):
    changed(copy, lambda w: w.update({"text_model.embeddings.position_ids": torch.arange(tiny_clip.TOKENS)[None],
                                      "vision_model.embeddings.position_ids": torch.arange(17)[None]}))
    assert np.array_equal(clip_of(copy).texts(["cat"]), clip_of(folder).texts(["cat"]))


def test_damaged_weights(copy):
    (copy / "model.safetensors").write_bytes((copy / "model.safetensors").read_bytes()[:500])
    assert "option model" in refused(copy)


@pytest.mark.parametrize(("option", "wanted"), [("model", "a CLIPModel"), ("processor", "a preprocessor_config.json")])
def test_what_the_hub_does_not_give_is_named(folder, option, wanted):
    with pytest.raises(RewardError) as error:
        rewards.get("clipscore", **{"model": str(folder), option: "nobody/no-such-model"})
    text = str(error.value)
    assert f"reward clipscore: option {option}: 'nobody/no-such-model' cannot be loaded as {wanted}" in text
    assert "HF_HUB_OFFLINE is set" in text


def test_folders_that_are_not_there(tmp_path):
    text = refused(tmp_path / "absent")
    assert "option model" in text and "nothing of that name is on this machine" in text


def test_a_folder_without_a_processor(copy):
    (copy / "preprocessor_config.json").unlink()
    text = refused(copy)
    assert "option model" in text and "preprocessor_config.json" in text and "on this machine" not in text


def test_preprocessing_for_another_size(copy):
    path = copy / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"crop_size": {"height": 24, "width": 24}}))
    assert "gives images of [3, 24, 24], and the model takes [3, 32, 32]" in refused(copy)


def test_tokenizers_that_do_not_belong_to_the_model(copy, tmp_path, folder):
    other = shutil.copytree(folder, tmp_path / "other")
    CLIPTokenizer(vocab={f"w{i}": i for i in range(300)} | {"<|startoftext|>": 300, "<|endoftext|>": 301}, merges=[]
                  ).save_pretrained(other)
    assert "has 302 tokens, and the model knows 88" in refused(folder, processor=str(other))
    letters = {piece: i for i, piece in enumerate(f"{c}{end}" for c in "abcdefgh" for end in ("", "</w>"))}
    CLIPTokenizer(vocab=letters | {"<|startoftext|>": 50, "<|endoftext|>": 51}, merges=[]).save_pretrained(other)
    assert "every prompt has the same embedding" in refused(folder, processor=str(other))  # its end is not the model's
    (copy / "tokenizer.json").unlink()
    assert f"option model: '{copy}' cannot be loaded as a CLIP tokenizer (FileNotFoundError: no tokenizer.json" in refused(copy)


def test_state_dicts_are_read_without_running_code(tmp_path):
    class Runs:
        def __reduce__(self):
            return (print, ("run",))

    torch.save({"a": Runs()}, tmp_path / "evil.pt")
    torch.save([torch.zeros(1)], tmp_path / "list.pt")
    torch.save({"a": torch.zeros(1), "epoch": 3}, tmp_path / "mixed.pt")
    torch.save({"epoch": 1, "state_dict": {"a": torch.ones(1)}}, tmp_path / "wrapped.pt")
    (tmp_path / "cut.safetensors").write_bytes(io.BytesIO(b"\x10").getvalue())
    read = clip_models.load_state_dict
    assert read("hpsv2", "checkpoint", tmp_path / "wrapped.pt")["a"].tolist() == [1.0]
    for name, message in (("evil.pt", "a torch file of tensors alone"), ("list.pt", "holds no state dict"),
                          ("mixed.pt", "holds no state dict"),
                          ("cut.safetensors", "cannot be read")):
        with pytest.raises(RewardError, match=f"reward hpsv2: option checkpoint: .*{name}.*{message}"):
            read("hpsv2", "checkpoint", tmp_path / name)


def test_clip_takes_the_models_scale(folder):
    model = CLIPModel.from_pretrained(folder)
    clip = Clip(model, lambda image: image, None, dtype="float32", batch_size=2)
    assert clip.logit_scale == pytest.approx(float(model.logit_scale.exp()), rel=1e-6) and clip.width == tiny_clip.WIDTH
