"""geneval with real detectors and CLIPs: small, random, of transformers' own classes, saved to disk."""

import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_clip
import tiny_yolos
import torch
from answering import serving
from PIL import Image
from safetensors.torch import load_file, save_file
from test_reward_server import served
from transformers import (
    AutoImageProcessor,
    CLIPModel,
    CLIPTokenizer,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    SwinConfig,
    YolosForObjectDetection,
)
from transformers.models.auto import image_processing_auto
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.mask2former.image_processing_pil_mask2former import Mask2FormerImageProcessorPil
from transformers.models.yolos.image_processing_pil_yolos import YolosImageProcessorPil

from flowgrpo_ray import rewards
from flowgrpo_ray.errors import ConfigError
from flowgrpo_ray.rewards import RewardError, geneval_models, validated
from flowgrpo_ray.rewards.geneval_models import ColourClassifier, TransformersDetector, name_of, object_image
from flowgrpo_ray.rewards.geneval_rules import COLOURS, FLOW_GRPO_RANGE, Detection

NAMES = {0: "cat", 1: "dog", 2: "remote", 3: "N/A"}
QUERIES = 5
IMAGES = np.random.default_rng(3).integers(0, 256, (3, 40, 50, 3), np.uint8)
DOGS = {"tag": "counting", "include": [{"class": "dog", "count": 3}], "exclude": [{"class": "dog", "count": 4}]}
needs_scipy = pytest.mark.skipif(
    importlib.util.find_spec("scipy") is None, reason="scipy is not installed; a slow test runs this with it")


@pytest.fixture(scope="module")
def detector(tmp_path_factory):
    """A YOLOS that takes everything for dogs, at places that depend on the image."""
    return str(tiny_yolos.save(tmp_path_factory.mktemp("yolos"), tiny_yolos.sure_of_1(NAMES, QUERIES)))


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return str(tiny_clip.build(tmp_path_factory.mktemp("clip")))


def local(detector, clip, **options):
    return rewards.get("geneval", detector=detector, clip=clip, **options)


def score(reward, metadata, images=IMAGES):
    return reward.score(images, ["a photo"] * len(images), [metadata] * len(images))


# Detectors ------------------------------------------------------------------------------------------------------------

def test_boxes_are_the_model_s_own_in_pixels(detector):
    found = TransformersDetector(detector, batch_size=2).detect(IMAGES)
    model = YolosForObjectDetection.from_pretrained(detector).eval()
    pixels = YolosImageProcessorPil.from_pretrained(detector)(images=list(map(Image.fromarray, IMAGES)), return_tensors="pt")
    with torch.no_grad():
        out = model(pixel_values=pixels["pixel_values"])
    scores = out.logits.softmax(-1)[..., :-1]
    cx, cy, w, h = out.pred_boxes.unbind(-1)
    corners = torch.stack([(cx - w / 2) * 50, (cy - h / 2) * 40, (cx + w / 2) * 50, (cy + h / 2) * 40], -1)
    assert [len(objects) for objects in found] == [QUERIES] * 3
    for i, objects in enumerate(found):
        assert all(o.label == NAMES[int(scores[i, j].argmax())] == "dog" and o.mask is None for j, o in enumerate(objects))
        np.testing.assert_allclose([o.confidence for o in objects], scores[i].max(-1).values, rtol=1e-4)
        np.testing.assert_allclose([o.box for o in objects], corners[i], atol=1e-3)


def test_labels_leave_out_what_is_no_class(detector):
    assert TransformersDetector(detector).labels == {"cat", "dog", "remote"}


def test_images_are_prepared_by_pillow_also_where_torchvision_is_there(detector, monkeypatch):
    class ByTorchvision(YolosImageProcessorPil):
        pass

    own = image_processing_auto.get_image_processor_class_from_name
    monkeypatch.setattr(image_processing_auto, "is_torchvision_available", lambda: True)
    monkeypatch.setattr(image_processing_auto, "get_image_processor_class_from_name",
                        lambda name: ByTorchvision if name == "YolosImageProcessor" else own(name))
    assert type(AutoImageProcessor.from_pretrained(detector)) is ByTorchvision
    assert type(TransformersDetector(detector)._processor) is YolosImageProcessorPil


def test_an_image_may_have_nothing_in_it(detector):
    model = TransformersDetector(detector)
    unsure = torch.zeros(2, QUERIES, len(NAMES) + 1)
    boxes = SimpleNamespace(logits=unsure, pred_boxes=torch.rand(2, QUERIES, 4))
    assert model._from_boxes(boxes, IMAGES[:2]) == [[], []]
    masks = SimpleNamespace(class_queries_logits=unsure, masks_queries_logits=torch.ones(2, QUERIES, 16, 16))
    assert model._from_masks(masks, IMAGES[:2]) == [[], []]
    one = unsure.clone()
    one[1, 2, 1] = 9.0
    empty, (dog,) = model._from_masks(SimpleNamespace(**vars(masks) | {"class_queries_logits": one}), IMAGES[:2])
    assert empty == [] and dog.label == "dog" and dog.box == (0, 0, 50, 40) and dog.mask.all()
    assert dog.confidence == pytest.approx(one[1, 2].softmax(0)[1].item() * torch.sigmoid(torch.ones(())).item(), rel=1e-5)


@pytest.fixture(scope="module")
def segmenter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mask2former")
    torch.manual_seed(0)
    backbone = SwinConfig(image_size=64, patch_size=4, embed_dim=8, depths=[1] * 4, num_heads=[1, 2, 2, 2], window_size=4,
                          out_features=[f"stage{i}" for i in range(1, 5)])
    model = Mask2FormerForUniversalSegmentation(Mask2FormerConfig(
        backbone_config=backbone, feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=32,
        dim_feedforward=32, encoder_layers=1, decoder_layers=2, num_attention_heads=2, num_queries=6, init_std=0.5,
        id2label=NAMES, label2id={v: k for k, v in NAMES.items()}))
    # Without these every mask would be the whole image, and every class as likely as the others.
    torch.nn.init.normal_(model.class_predictor.weight, std=0.5)
    for weight in model.model.transformer_module.decoder.mask_predictor.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.4)
    model.save_pretrained(folder)
    Mask2FormerImageProcessorPil(size={"height": 64, "width": 64}).save_pretrained(folder)
    return str(folder)


@needs_scipy
def test_masks_are_those_of_transformers_own_post_processing(segmenter):
    found = TransformersDetector(segmenter, batch_size=2).detect(IMAGES)
    processor = Mask2FormerImageProcessorPil.from_pretrained(segmenter)
    model = Mask2FormerForUniversalSegmentation.from_pretrained(segmenter).eval()
    pixels = processor(images=list(map(Image.fromarray, IMAGES)), return_tensors="pt")
    with torch.no_grad():
        out = model(pixel_values=pixels["pixel_values"])
    wanted = processor.post_process_instance_segmentation(
        out, threshold=geneval_models.CONFIDENCE, target_sizes=[(40, 50)] * 3, return_binary_maps=True)
    assert sum(map(len, found)) >= 3
    for objects, result in zip(found, wanted, strict=True):
        infos = result["segments_info"]
        own = sorted(zip(infos, result["segmentation"], strict=False), key=lambda pair: -pair[0]["score"])
        objects = sorted(objects, key=lambda o: -o.confidence)
        assert [o.label for o in objects] == [NAMES[info["label_id"]] for info, _ in own]
        np.testing.assert_allclose([o.confidence for o in objects], [info["score"] for info, _ in own], atol=1e-5)
        for o, (_, mask) in zip(objects, own, strict=True):
            assert o.mask.dtype == bool and np.array_equal(o.mask, mask.numpy() == 1)
            rows, columns = np.nonzero(o.mask)
            assert o.box == (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
    assert any(0 < o.mask.mean() < 1 for objects in found for o in objects)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("scipy") is not None, reason="scipy is there, so the test above has run")
def test_the_same_with_scipy_in_a_folder_of_its_own(tmp_path):
    """scipy stays out of the environment of the tests: transformers and diffusers import it into every process if they can."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path / "site")]
    subprocess.run([*pip, "scipy>=1.13"], check=True)
    path = os.pathsep.join([str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    name = test_masks_are_those_of_transformers_own_post_processing.__name__
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{__file__}::{name}"],
                          env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(importlib.util.find_spec("scipy") is not None, reason="scipy is there")
def test_a_package_that_a_detector_lacks_is_named(tmp_path):
    Mask2FormerConfig(backbone_config=SwinConfig()).save_pretrained(tmp_path)
    Mask2FormerImageProcessorPil().save_pretrained(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RewardError, match="needs a further package: pip install scipy"):
        TransformersDetector(str(tmp_path))


def test_what_is_no_detector_is_refused(detector, clip, tmp_path):
    with pytest.raises(RewardError, match="is a clip, which transformers has neither for object detection nor"):
        TransformersDetector(clip)
    with pytest.raises(RewardError, match="option detector: '.*nothing' cannot be loaded as a detector"):
        TransformersDetector(str(tmp_path / "nothing"))
    TransformersDetector(detector)._model.save_pretrained(tmp_path)
    TransformersDetector(detector)._processor.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["class_labels_classifier.layers.2.bias"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RewardError, match="missing class_labels_classifier.layers.2.bias"):
        TransformersDetector(str(tmp_path))


def test_names_of_classes():
    labels = frozenset({"remote", "dog", "pottedplant", "tv"})
    assert name_of("dog", labels, {}) == "dog"
    assert name_of("tv remote", labels, {}) == "remote"
    assert name_of("potted plant", labels, {}) == "pottedplant"
    assert name_of("hound", labels, {"hound": "dog"}) == "dog"
    with pytest.raises(RewardError, match="knows no class 'dogs'; did you mean dog"):
        name_of("dogs", labels, {})
    with pytest.raises(RewardError, match="knows no class 'hound'"):
        name_of("hound", labels, {"hound": "wolf"})


# Colours --------------------------------------------------------------------------------------------------------------

def test_the_image_of_an_object():
    image = IMAGES[0]
    assert np.array_equal(object_image(image, Detection("x", 1, (10.4, 5.0, 20.2, 9.6))), image[5:10, 10:21])
    assert np.array_equal(object_image(image, Detection("x", 1, (-5, -5, 500, 500))), image)
    assert object_image(image, Detection("x", 1, (49.9, 39.9, 60, 60))).shape == (1, 1, 3)
    assert object_image(image, Detection("x", 1, (70, 70, 80, 80))).shape == (1, 1, 3)
    mask = np.zeros((40, 50), bool)
    mask[5:7, 10:12] = True
    cut = object_image(image, Detection("x", 1, (10, 5, 14, 7), mask))
    assert np.array_equal(cut[:, :2], image[5:7, 10:12]) and (cut[:, 2:] == 0x99).all()


def test_colours_are_the_nearest_of_clip_s_texts(clip):
    objects = [Detection("dog", 1, (x, y, x + 20, y + 25)) for x in (0, 13, 30) for y in (0, 15)]
    got = ColourClassifier(clip).colours(IMAGES[1], "dog", objects)
    model, tokenizer = CLIPModel.from_pretrained(clip).eval(), CLIPTokenizer.from_pretrained(clip)
    crops = [Image.fromarray(IMAGES[1]).crop((x, y, min(x + 20, 50), y + 25)) for x in (0, 13, 30) for y in (0, 15)]
    pixels = CLIPImageProcessorPil.from_pretrained(clip)(images=crops, return_tensors="pt")
    texts = [text.format(colour=c, name="dog") for c in COLOURS for text in (
        "a photo of a {colour} {name}", "a photo of a {colour}-colored {name}", "a photo of a {colour} object")]
    words = tokenizer(texts, padding="max_length", truncation=True, max_length=tiny_clip.TOKENS, return_tensors="pt")
    with torch.no_grad():
        image = torch.nn.functional.normalize(model.get_image_features(**pixels).pooler_output, dim=-1)
        text = torch.nn.functional.normalize(model.get_text_features(words["input_ids"]).pooler_output, dim=-1)
    mean = torch.nn.functional.normalize(text.reshape(len(COLOURS), 3, -1).mean(1), dim=-1)
    assert got == [COLOURS[i] for i in (image @ mean.T).argmax(-1)]
    assert ColourClassifier(clip).colours(IMAGES[1], "dog", []) == []


# The reward -----------------------------------------------------------------------------------------------------------

def test_scores_are_the_rules_on_what_is_detected(detector, clip):
    reward = local(detector, clip)
    found = score(reward, DOGS)  # five dogs for three
    assert list(found) == ["geneval", "geneval_strict"] and all(values.dtype == np.float32 for values in found.values())
    assert all(values.shape == (0,) and values.dtype == np.float32 for values in score(reward, DOGS, IMAGES[:0]).values())
    assert found["geneval"] == pytest.approx([1 / 3] * 3) and found["geneval_strict"].tolist() == [0] * 3
    five = {"tag": "counting", "include": [{"class": "dog", "count": 5}], "exclude": [{"class": "dog", "count": 6}]}
    assert [values.tolist() for values in score(reward, five).values()] == [[1] * 3, [1] * 3]
    none = {"tag": "two_object", "include": [{"class": "cat", "count": 1}, {"class": "tv remote", "count": 1}]}
    assert [values.tolist() for values in score(reward, none).values()] == [[0] * 3, [0] * 3]


def test_the_grading_says_what_is_optimised(detector, clip):
    graded, all_or_nothing = local(detector, clip, grading="flow_grpo"), local(detector, clip, grading="geneval")
    assert graded.range == FLOW_GRPO_RANGE == rewards.reward_class("geneval").range and all_or_nothing.range == (0, 1)
    one = {"tag": "single_object", "include": [{"class": "dog", "count": 1}]}  # five are found
    for metadata, soft, strict in ((DOGS, 1 / 3, 0), (one, -3, 1)):
        assert score(graded, metadata)["geneval"] == pytest.approx([soft] * 3)
        assert score(all_or_nothing, metadata)["geneval"].tolist() == [strict] * 3
        for reward in (graded, all_or_nothing):
            found = validated(score(reward, metadata), 3, "geneval", range=reward.range)
            assert found["geneval_strict"].tolist() == [strict] * 3


def test_colours_count(detector, clip):
    reward = local(detector, clip)
    for image, found in zip(IMAGES, TransformersDetector(detector).detect(IMAGES), strict=True):
        seen = ColourClassifier(clip).colours(image, "dog", sorted(found, key=lambda o: -o.confidence))
        for colour in COLOURS:
            metadata = {"tag": "colors", "include": [{"class": "dog", "count": QUERIES, "color": colour}]}
            scores = score(reward, metadata, image[None])
            assert scores["geneval"] == pytest.approx([(1 + seen.count(colour) / QUERIES) / 2])
            assert scores["geneval_strict"].tolist() == [float(seen.count(colour) == QUERIES)]
            surest = {"tag": "colors", "include": [{"class": "dog", "count": 1, "color": colour}]}
            assert score(reward, surest, image[None])["geneval_strict"].tolist() == [float(seen[0] == colour)]


def test_batches_do_not_change_scores(detector, clip):
    metadata = [DOGS, {"tag": "colors", "include": [{"class": "dog", "count": 5, "color": "red"}]}] * 2
    images = np.concatenate([IMAGES, IMAGES[:1]])
    together = local(detector, clip, batch_size=4).score(images, [""] * 4, metadata)
    reward = local(detector, clip, batch_size=1)
    for i in range(4):
        alone = reward.score(images[i : i + 1], [""], metadata[i : i + 1])
        assert all(alone[key][0] == together[key][i] for key in together)


def test_names_of_one_s_own(detector, clip):
    metadata = {"tag": "counting", "include": [{"class": "hound", "count": 5}]}
    with pytest.raises(RewardError, match="knows no class 'hound'.*class_names"):
        score(local(detector, clip), metadata)
    reward = local(detector, clip, class_names={"hound": "dog"})
    assert score(reward, metadata)["geneval"].tolist() == [1] * 3
    # Two of a prompt's classes may be one to the detector.
    both = metadata | {"include": [*metadata["include"], {"class": "dog", "count": 5}]}
    assert score(reward, both)["geneval"].tolist() == [1] * 3


def test_a_prompt_without_metadata_is_found_before_anything_starts(detector, clip):
    cls = rewards.reward_class("geneval")
    assert "needs the metadata of a GenEval prompt: the metadata has no tag" in cls.check_prompt("a dog", {})
    assert cls.check_prompt("a dog", DOGS) is None
    with pytest.raises(RewardError, match="prompt 'a photo': geneval needs the metadata"):
        score(local(detector, clip), {})


def test_self_test_scores_two_images(detector, clip):
    local(detector, clip).self_test()


@pytest.mark.parametrize(("options", "message"), [
    ({}, "give option url .* or option detector"),
    ({"url": "http://x", "detector": "y"}, "one of the two"),
    ({"url": "x"}, "option url is 'x', not of the form"),
    ({"url": "http://x", "clip": "c"}, "option clip means nothing with url"),
    ({"url": "http://x", "grading": "geneval"}, "option grading means nothing with url"),
    ({"detector": "y", "grading": "flowgrpo"}, "option grading is 'flowgrpo'; the choices are flow_grpo, geneval"),
    ({"detector": "y", "retries": 1}, "option retries means nothing with detector"),
    ({"detector": "y", "class_names": "tv"}, "option class_names is 'tv', not of type dict"),
])
def test_wrong_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        rewards.get("geneval", **options)


# On a server ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("grading", ["flow_grpo", "geneval"])
def test_a_served_geneval_scores_as_the_local_one(detector, clip, grading):
    here = local(detector, clip, grading=grading)
    metadata = [DOGS, {"tag": "colors", "include": [{"class": "dog", "count": 5, "color": "red"}]},
                {"tag": "single_object", "include": [{"class": "dog", "count": 1}]}]
    with served(here) as url:
        there = rewards.get("geneval", url=url, batch_size=2, backoff_s=0.0)
        assert there.range == here.range
        there.self_test()
        found, wanted = (reward.score(IMAGES, ["p"] * 3, metadata) for reward in (there, here))
        assert list(found) == list(wanted) == ["geneval", "geneval_strict"]
        assert all(found[key].tobytes() == wanted[key].tobytes() for key in wanted)


@pytest.mark.parametrize(("declared", "expected"), [
    ([None, None], FLOW_GRPO_RANGE), ([0, 1], (0, 1)), ([-100, 100], FLOW_GRPO_RANGE), ([-1, None], (-1, 1)),
])
def test_a_server_may_declare_a_narrower_range(declared, expected):
    health = {"name": "geneval", "range": declared, "scope": "sample"}
    with serving(lambda method, path, body: (200, health)) as server:
        assert rewards.get("geneval", url=server.url).range == expected
        assert rewards.get("geneval", url=server.url, score="another").range == FLOW_GRPO_RANGE


@pytest.mark.parametrize(("health", "message"), [
    ({"name": "ocr", "range": [0, 1], "needs": ["prompt"]}, "nor does it need the metadata of a GenEval prompt"),
    ({"name": "own", "range": [0, 1], "needs": []}, "nor does it need the metadata of a GenEval prompt"),
    ({"name": "deqa", "range": [1, 5]}, "nor is its range inside that of geneval, -14 to 1"),
    ({"name": "own", "range": [None, None]}, "nor is its range inside that of geneval, -14 to 1"),
    ({"name": "geneval", "range": [1, 5]}, "geneval's scores are in -14 to 1"),
])
def test_the_server_of_another_reward_is_refused(health, message):
    with serving(lambda method, path, body: (200, {"scope": "sample"} | health)) as server:
        with pytest.raises(RewardError, match=f"reward geneval: {server.url} serves {health['name']}, .*{message}"):
            rewards.get("geneval", url=server.url)


@pytest.mark.parametrize("more", [{}, {"needs": ["tag", "include", "exclude"]}, {"needs": "metadata"}])
def test_a_server_of_any_make_may_grade(more):
    health = {"name": "objects", "range": [0, 1], "scope": "sample"} | more
    with serving(lambda method, path, body: (200, health)) as server:
        assert rewards.get("geneval", url=server.url).range == (0, 1)


@pytest.mark.parametrize("key", ["geneval", "geneval_strict"])
def test_a_sentinel_is_no_score(key):
    health = {"name": "geneval", "range": [0, 1], "scope": "sample"}
    scores = {"geneval": [1, 0.5], "geneval_strict": [1, 0]}

    def answer(method, path, body):
        return 200, health if path == "/health" else {"scores": scores | {key: [1, -10]}}

    with serving(answer) as server:
        reward = rewards.get("geneval", url=server.url)
        with pytest.raises(RewardError, match=rf"reward {key}: -10 is outside 0 to 1, so it is no score .* at \[1\] of 2"):
            validated(score(reward, DOGS, IMAGES[:2]), 2, "geneval", range=reward.range)
