import base64
import io
import shutil
import subprocess
import sys
import weakref

import numpy as np
import pytest
import tiny_clip
import torch
from PIL import Image
from raw_png import GREY, RGB, png
from safetensors.torch import load_file, save_file
from transformers import CLIPModel, CLIPTokenizer
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from flowgrpo_ray import rewards
from flowgrpo_ray.rewards import RewardError, clip_scores
from flowgrpo_ray.rewards.http_client import to_png
from flowgrpo_ray.rewards.image_files import read_rgb

PROMPTS = ["a red cat", "a dog", "a red cat", "two birds", ""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_clip.build(tmp_path_factory.mktemp("clip"))


def noise(n, height=40, width=56, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, height, width, 3), np.uint8)


def made(name, folder, **options):
    processor = {"processor": str(folder)} if name == "pickscore" else {}
    return rewards.get(name, model=str(folder), **processor, **options)


def logits(folder, images, prompts):
    """CLIPModel's own `logits_per_image`, [n, n]."""
    pixels = CLIPImageProcessorPil.from_pretrained(folder)(images=[Image.fromarray(i) for i in images], return_tensors="pt")
    words = CLIPTokenizer.from_pretrained(folder)(prompts, padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        return CLIPModel.from_pretrained(folder)(**words, **pixels).logits_per_image.numpy()


@pytest.mark.parametrize(("name", "options", "divisor"), [
    ("pickscore", {}, 26), ("clipscore", {}, 30), ("clipscore", {"scale": 7.5}, 7.5), ("clipscore", {"scale": 100}, 100)])
def test_scores_are_the_models_logits_as_published(folder, name, options, divisor):
    images = noise(5)
    result = made(name, folder, **options).score(images, PROMPTS, [{}] * 5)
    assert list(result) == [name] and result[name].dtype == np.float32
    np.testing.assert_allclose(result[name], logits(folder, images, PROMPTS).diagonal() / divisor, atol=1e-6)
    assert np.ptp(result[name]) > 1e-3


@pytest.mark.parametrize("name", ["pickscore", "clipscore"])
def test_a_score_does_not_depend_on_the_batch(folder, name):
    images = noise(6)
    prompts = [*PROMPTS, "a very long prompt of more letters than there is room for"]
    reward = made(name, folder)
    together = reward.score(images, prompts, [{}] * 6)[name]
    alone = [made(name, folder).score(images[i : i + 1], prompts[i : i + 1], [{}])[name] for i in range(6)]
    turned = made(name, folder, batch_size=1).score(images[::-1], prompts[::-1], [{}] * 6)[name][::-1]
    assert together.tobytes() == np.concatenate(alone).tobytes() == turned.tobytes()
    assert reward.score(noise(0), [], [])[name].shape == (0,)


def test_the_range_follows_the_scale(folder):
    assert made("clipscore", folder).range == pytest.approx((-100 / 30, 100 / 30))
    assert made("clipscore", folder, scale=1).range == (-100, 100)
    assert rewards.reward_class("clipscore").range == pytest.approx((-100 / 30, 100 / 30))


def test_red_and_blue_are_not_mixed_up(folder):
    """In BGR the two images would swap their scores."""
    images = np.zeros((2, 32, 32, 3), np.uint8)
    images[0, ..., 0] = images[1, ..., 2] = 255
    got = made("clipscore", folder).score(images, ["a"] * 2, [{}] * 2)["clipscore"]
    np.testing.assert_allclose(got, logits(folder, images, ["a"] * 2).diagonal() / 30, atol=1e-6)
    assert abs(got[0] - got[1]) > 1e-3


def negated(folder, target):
    """A copy of the model that prefers exactly what the other does not."""
    copy = shutil.copytree(folder, target)
    weights = load_file(copy / "model.safetensors")
    weights["text_projection.weight"] = -weights["text_projection.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


@pytest.mark.parametrize("name", ["pickscore", "clipscore"])
def test_the_self_test_catches_a_model_with_the_wrong_order(folder, tmp_path, name):
    both = [made(name, folder), made(name, negated(folder, tmp_path / "negated"))]
    case = both[0].self_test_case()
    assert case.images[0, 0, 0].tolist() == [255, 0, 0] and case.images[1, 0, 0].tolist() == [0, 0, 255]
    right, wrong = sorted(both, key=lambda r: -np.subtract(*r.score(case.images, case.prompts, [{}] * 2)[name]))
    right.self_test()
    with pytest.raises(RewardError, match=f"reward {name} fails its self-test: known images should score from high to low"):
        wrong.self_test()


def test_defaults_are_the_published_models():
    options = {name: rewards.reward_class(name).options for name in ("pickscore", "clipscore", "image_similarity")}
    assert options["pickscore"]["model"].default == "yuvalkirstain/PickScore_v1"
    assert options["pickscore"]["processor"].default == "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    assert {options[name]["model"].default for name in ("clipscore", "image_similarity")} == {"openai/clip-vit-large-patch14"}
    with pytest.raises(RewardError, match="reward pickscore: option model: 'yuvalkirstain/PickScore_v1' cannot be loaded"):
        rewards.get("pickscore")


def test_modules_import_cheaply():
    code = ("import sys, flowgrpo_ray.rewards.hpsv2, flowgrpo_ray.rewards.aesthetic, flowgrpo_ray.rewards.clip_scores; "
            "print([m for m in ('torch', 'transformers', 'PIL', 'huggingface_hub') if m in sys.modules])")
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == "[]"


# image_similarity -----------------------------------------------------------------------------------------------------

def write(path, image):
    Image.fromarray(image).save(path)
    return path


@pytest.fixture(scope="module")
def similarity(folder):
    return made("image_similarity", folder)


def test_similarity_is_the_cosine_of_the_models_embeddings(folder, similarity, tmp_path):
    images, references = noise(3), noise(2, 64, 64, seed=1)
    paths = [write(tmp_path / f"an image {i}.png", r) for i, r in enumerate(references)]
    uris = [str(paths[0]), paths[1].as_uri(), data_uri(to_png(references[0]))]
    assert "%20" in uris[1]
    with torch.no_grad():
        pixels = CLIPImageProcessorPil.from_pretrained(folder)(
            images=[Image.fromarray(i) for i in [*images, *references]], return_tensors="pt")
        model = CLIPModel.from_pretrained(folder)
        embedded = model.visual_projection(model.vision_model(**pixels).pooler_output)
    wanted = torch.cosine_similarity(embedded[:3], embedded[[3, 4, 3]]).numpy()
    got = similarity.score(images, [""] * 3, [{"image": uri} for uri in uris])["image_similarity"]
    np.testing.assert_allclose(got, wanted, atol=1e-6)
    assert np.ptp(got) > 1e-3


def data_uri(data):
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def with_alpha(image, value):
    buffer = io.BytesIO()
    Image.fromarray(np.concatenate([image, np.full((*image.shape[:2], 1), value, np.uint8)], axis=2)).save(buffer, "PNG")
    return buffer.getvalue()


def test_a_reference_is_read_once_and_its_mode_converted(folder, tmp_path):
    reward, image = made("image_similarity", folder), noise(1)
    path = tmp_path / "alpha.png"
    path.write_bytes(with_alpha(image[0], 255))
    metadata = [{"image": str(path)}]
    first = reward.score(image, [""], metadata)["image_similarity"]
    assert first[0] == pytest.approx(1, abs=1e-6)
    path.write_bytes(b"gone")
    assert reward.score(image, [""], metadata)["image_similarity"].tobytes() == first.tobytes()


class Uri(str):
    """One that can be seen to be gone."""


def test_of_a_reference_only_the_embedding_is_kept(folder, monkeypatch):
    monkeypatch.setattr(clip_scores, "CACHED_REFERENCES", 2)
    reward, image, read = made("image_similarity", folder), noise(1), []
    monkeypatch.setattr(clip_scores, "read_rgb", lambda source: (read.append(source), read_rgb(source))[1])
    texts = [data_uri(to_png(image)) for image in noise(3, seed=1)]

    def score(number):
        uri = Uri(texts[number])
        found = reward.score(image, [""], [{"image": uri}])["image_similarity"].item()
        return found, weakref.ref(uri)

    first, gone = score(0)
    assert gone() is None
    assert score(1)[0] != first and score(0)[0] == first and len(read) == 2
    score(2)  # takes the place of 1, which was used before 0
    assert score(0)[0] == first and len(read) == 3
    score(1)
    assert len(read) == 4


@pytest.mark.parametrize(("data", "message"), [
    (with_alpha(noise(1)[0], 9), "is transparent in places; put it on a background first"),
    (png(RGB, 8, [b"abcdef"], (b"tRNS", b"\0a\0b\0c"), width=2), "is transparent in places"),
    (png(GREY, 16, [b"\1\2\3\4"], width=2), "has more than 8 bits a channel"),
    (png(RGB, 8, [b"abcdef"], (b"pHYs", b"\0"), width=2), "cannot be read as an image: Truncated pHYs chunk"),
])
def test_a_reference_that_would_be_read_wrongly_is_refused(similarity, tmp_path, data, message):
    (tmp_path / "a.png").write_bytes(data)
    for uri in (str(tmp_path / "a.png"), data_uri(data)):
        with pytest.raises(RewardError, match=f"reward image_similarity: the reference image .* {message}"):
            similarity.score(noise(1), [""], [{"image": uri}])


@pytest.mark.parametrize(("metadata", "message"), [
    ({}, "needs a reference image in the prompt record"),
    ({"image": ""}, "needs a reference image in the prompt record"),
    ({"image": 3}, "needs a reference image in the prompt record"),
    ({"image": "no/such/cat.png"}, "there is no reference image no/such/cat.png"),
    ({"image": "file:///no/such/cat.png"}, "there is no reference image file:///no/such/cat.png"),
    ({"image": "s3://bucket/cat.png"}, "reads local images: s3://bucket/cat.png is not one"),
    ({"image": "https://host/cat.png"}, "reads local images: https://host/cat.png is not one"),
    ({"image": "file://host/cat.png"}, "reads local images: file://host/cat.png is not one"),
])
def test_a_missing_reference_is_named_before_any_model_is_loaded(similarity, metadata, message):
    problem = rewards.reward_class("image_similarity").check_prompt("a cat", metadata)
    assert message in problem and '"image": "references/cat.png"' in problem
    with pytest.raises(RewardError, match="prompt 'a cat': image_similarity"):
        similarity.score(noise(1), ["a cat"], [metadata])


@pytest.mark.parametrize("uri", ["data:image/png;base64,%%%", "data:image/png;base64,", "data:image/png;base64,A",
                                 "data:text/plain,cat", "broken.png"])
def test_a_reference_that_is_no_image_is_named(similarity, tmp_path, monkeypatch, uri):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.png").write_bytes(b"\x89PNG no more")
    with pytest.raises(RewardError, match=f"the reference image {uri} cannot be read"):
        similarity.score(noise(1), [""], [{"image": uri}])


def test_an_image_is_most_like_itself(similarity):
    similarity.self_test()
    case = similarity.self_test_case()
    scores = similarity.score(case.images, case.prompts, case.metadata)["image_similarity"]
    assert scores[0] == pytest.approx(1, abs=1e-6) and scores[1] < 0.99
