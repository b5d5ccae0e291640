import numpy as np
import pytest
import tiny_clip
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from transformers import CLIPModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from flowgrpo_ray import rewards
from flowgrpo_ray.rewards import RewardError


class Predictor(nn.Module):
    """The published stack, for embeddings of another width."""

    def __init__(self, width, seed=0, level=5.0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(width, 1024), nn.Dropout(0.2), nn.Linear(1024, 128), nn.Dropout(0.2),
                                    nn.Linear(128, 64), nn.Dropout(0.1), nn.Linear(64, 16), nn.Linear(16, 1))
        nn.init.normal_(self.layers[7].weight, std=2.0)
        nn.init.constant_(self.layers[7].bias, level)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_clip.build(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def predictor():
    return Predictor(tiny_clip.WIDTH).eval()


@pytest.fixture
def head(predictor, tmp_path):
    torch.save(predictor.state_dict(), tmp_path / "head.pth")
    return tmp_path / "head.pth"


def noise(n):
    return np.random.default_rng(0).integers(0, 256, (n, 40, 56, 3), np.uint8)


def made(folder, head):
    return rewards.get("aesthetic", model=str(folder), head=str(head))


def test_scores_are_the_predictors_on_embeddings_of_length_1(folder, head, predictor):
    images = noise(5)
    pixels = CLIPImageProcessorPil.from_pretrained(folder)(images=[Image.fromarray(i) for i in images], return_tensors="pt")
    model = CLIPModel.from_pretrained(folder)
    with torch.no_grad():
        embedded = model.visual_projection(model.vision_model(**pixels).pooler_output)
        wanted = predictor.layers(nn.functional.normalize(embedded, dim=-1))[:, 0].numpy()
    result = made(folder, head).score(images, [""] * 5, [{}] * 5)
    assert list(result) == ["aesthetic"] and result["aesthetic"].dtype == np.float32
    np.testing.assert_allclose(result["aesthetic"], wanted, atol=2e-5)
    assert np.ptp(wanted) > 1e-2


def test_a_score_does_not_depend_on_the_batch(folder, head):
    reward, images = made(folder, head), noise(5)
    together = reward.score(images, [""] * 5, [{}] * 5)["aesthetic"]
    alone = [reward.score(images[i : i + 1], ["x"], [{}])["aesthetic"] for i in range(5)]
    assert together.tobytes() == np.concatenate(alone).tobytes()
    assert reward.score(noise(0), [], [])["aesthetic"].shape == (0,)


def test_safetensors_and_wrapped_heads_give_the_same(folder, head, predictor, tmp_path):
    save_file(predictor.state_dict(), tmp_path / "head.safetensors")
    torch.save({"state_dict": predictor.state_dict()}, tmp_path / "wrapped.pth")
    scores = [made(folder, path).score(noise(2), [""] * 2, [{}] * 2)["aesthetic"].tobytes()
              for path in (head, tmp_path / "head.safetensors", tmp_path / "wrapped.pth")]
    assert len(set(scores)) == 1


def test_the_self_test_wants_ratings_between_0_and_10(folder, head, tmp_path):
    made(folder, head).self_test()
    torch.save(Predictor(tiny_clip.WIDTH, level=40.0).state_dict(), tmp_path / "wrong.pth")
    with pytest.raises(RewardError, match="reward aesthetic fails its self-test: .* outside 0 to 10"):
        made(folder, tmp_path / "wrong.pth").self_test()


@pytest.mark.parametrize(("change", "message"), [
    (lambda w: w.pop("layers.4.bias"), "missing layers.4.bias"),
    (lambda w: w.update({"layers.9.weight": torch.zeros(1)}), "unexpected layers.9.weight"),
    (lambda w: w.update({"layers.2.bias": torch.zeros(64)}), r"of another shape layers.2.bias \[64\] instead of \[128\]"),
    (lambda w: w.update({"layers.0.weight": torch.zeros(1024, 768)}),
     "takes embeddings of 768 numbers, and the CLIP model of option model gives 20"),
])
def test_heads_that_are_not_the_published_stack(folder, head, change, message):
    weights = torch.load(head)
    change(weights)
    torch.save(weights, head)
    with pytest.raises(RewardError, match=f"reward aesthetic: option head: .*head.pth.*{message}"):
        made(folder, head)


def test_a_head_that_is_not_there_says_where_it_is_published(folder, tmp_path):
    for head, message in (("trl-lib/ddpo-aesthetic-predictor/aesthetic-model.pth",
                           "cannot be loaded as a file or OWNER/REPO/FILE on the hub; nothing of that name"),
                          (str(tmp_path / "absent.pth"), "there is no file")):
        with pytest.raises(RewardError, match=f"option head: .*{message}.*improved-aesthetic-predictor"):
            made(folder, head)
    assert rewards.reward_class("aesthetic").options["head"].default == "trl-lib/ddpo-aesthetic-predictor/aesthetic-model.pth"
