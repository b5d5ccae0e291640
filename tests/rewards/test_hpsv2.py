"""hpsv2 against a model that is written here, module by module, as open_clip's checkpoints have it."""

import itertools
from collections import OrderedDict

import numpy as np
import pytest
import tiny_clip
import torch
from torch import nn
from transformers import CLIPConfig, CLIPModel

from flowgrpo_ray import rewards
from flowgrpo_ray.rewards import RewardError, hpsv2


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(OrderedDict(
            c_fc=nn.Linear(width, 2 * width), gelu=nn.GELU(), c_proj=nn.Linear(2 * width, width)))

    def forward(self, x, mask=None):
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class Tower(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.resblocks = nn.ModuleList([Block(width, heads), Block(width, heads)])

    def forward(self, x, mask=None):
        for block in self.resblocks:
            x = block(x, mask)
        return x


class Visual(nn.Module):
    def __init__(self, width, heads, out):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 8, 8, bias=False)
        self.class_embedding = nn.Parameter(torch.randn(width))
        self.positional_embedding = nn.Parameter(torch.randn((tiny_clip.SIZE // 8) ** 2 + 1, width))
        self.ln_pre, self.transformer, self.ln_post = nn.LayerNorm(width), Tower(width, heads), nn.LayerNorm(width)
        self.proj = nn.Parameter(torch.randn(width, out))

    def forward(self, x):
        x = self.conv1(x).flatten(2).permute(0, 2, 1)
        x = torch.cat([self.class_embedding.expand(len(x), 1, -1), x], dim=1) + self.positional_embedding
        return self.ln_post(self.transformer(self.ln_pre(x))[:, 0]) @ self.proj


class OpenClip(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.visual = Visual(32, 4, tiny_clip.WIDTH)
        self.token_embedding = nn.Embedding(vocabulary, 24)
        self.positional_embedding = nn.Parameter(torch.randn(tiny_clip.TOKENS, 24))
        self.transformer, self.ln_final = Tower(24, 2), nn.LayerNorm(24)
        self.text_projection = nn.Parameter(torch.randn(24, tiny_clip.WIDTH))
        self.logit_scale = nn.Parameter(torch.tensor(3.0))

    def text(self, ids):
        mask = torch.full((ids.shape[1],) * 2, -torch.inf).triu(1)
        x = self.transformer(self.token_embedding(ids) + self.positional_embedding, mask)
        return self.ln_final(x)[torch.arange(len(x)), ids.argmax(dim=1)] @ self.text_projection


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_clip.build(tmp_path_factory.mktemp("clip"), act="gelu")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    made = OpenClip(len(tiny_clip.tokenizer())).eval()
    for name, weight in made.named_parameters():
        if name.endswith("bias"):  # MultiheadAttention starts with zeros, which would hide a wrong order
            nn.init.normal_(weight, std=0.3)
    return made


@pytest.fixture
def checkpoint(model, tmp_path):
    torch.save({"epoch": 3, "state_dict": model.state_dict()}, tmp_path / "HPS.pt")
    return tmp_path / "HPS.pt"


def made(folder, checkpoint, **options):
    return rewards.get("hpsv2", checkpoint=str(checkpoint), config=str(folder), processor=str(folder), **options)


def noise(n, height=32, width=32):
    return np.random.default_rng(0).integers(0, 256, (n, height, width, 3), np.uint8)


def ids(prompt):
    """Padded with 0 after the end, as open_clip does."""
    got = tiny_clip.tokenizer()(prompt)["input_ids"]
    end = got[-1]
    got = got if len(got) <= tiny_clip.TOKENS else [*got[: tiny_clip.TOKENS - 1], end]
    return got + [0] * (tiny_clip.TOKENS - len(got))


def test_scores_are_the_cosines_of_the_checkpoints_model(folder, checkpoint, model):
    images, prompts = noise(4), ["a red cat", "a dog", "", "a prompt that is longer than the text tower"]
    pixels = torch.tensor(images / 255).permute(0, 3, 1, 2)
    mean, std = torch.tensor([0.48145466, 0.4578275, 0.40821073]), torch.tensor([0.26862954, 0.26130258, 0.27577711])
    with torch.no_grad():
        image = model.visual(((pixels - mean[:, None, None]) / std[:, None, None]).float())
        text = model.text(torch.tensor([ids(prompt) for prompt in prompts]))
        wanted = torch.cosine_similarity(image, text).numpy()
    result = made(folder, checkpoint).score(images, prompts, [{}] * 4)
    assert list(result) == ["hpsv2"] and result["hpsv2"].dtype == np.float32
    np.testing.assert_allclose(result["hpsv2"], wanted, atol=2e-6)
    assert np.ptp(wanted) > 0.05


def test_a_score_does_not_depend_on_the_batch(folder, checkpoint):
    images, prompts = noise(4, 50, 30), ["a", "b", "c", "a"]
    reward = made(folder, checkpoint)
    together = reward.score(images, prompts, [{}] * 4)["hpsv2"]
    alone = [reward.score(images[i : i + 1], prompts[i : i + 1], [{}])["hpsv2"] for i in range(4)]
    assert together.tobytes() == np.concatenate(alone).tobytes()


def test_a_checkpoint_in_half_precision_without_a_wrapper(folder, checkpoint, model, tmp_path):
    torch.save({key: value.half() for key, value in model.state_dict().items()}, tmp_path / "half.pt")
    full, half = (made(folder, path).score(noise(3), ["a"] * 3, [{}] * 3)["hpsv2"]
                  for path in (checkpoint, tmp_path / "half.pt"))
    assert 0 < np.abs(full - half).max() < 0.01


@pytest.mark.parametrize(("height", "width"), [(64, 128), (128, 64), (16, 8), (64, 32), (32, 20)])
def test_the_longest_side_is_resized_and_black_around(height, width):
    image = np.full((height, width, 3), [250, 128, 3], np.uint8)
    got = hpsv2._fitted(32)(image)
    mean, std = hpsv2._MEAN, hpsv2._STD
    pixels = (got * std + mean) * 255
    assert got.shape == (3, 32, 32) and got.dtype == np.float32
    shown = (32 * height // max(height, width), 32 * width // max(height, width))
    top, left = (32 - shown[0]) // 2, (32 - shown[1]) // 2
    wanted = np.zeros((32, 32, 3))
    wanted[top : top + shown[0], left : left + shown[1]] = [250, 128, 3]
    np.testing.assert_allclose(pixels.transpose(1, 2, 0), wanted, atol=1e-3)


def test_resizing_is_antialiased():
    image = np.zeros((128, 128, 3), np.uint8)
    image[::4] = 255  # a quarter white; without antialiasing the white rows would weigh less than 0
    pixels = hpsv2._fitted(32)(image) * hpsv2._STD + hpsv2._MEAN
    np.testing.assert_allclose(pixels[:, 4:-4], 0.25, atol=0.01)


def test_prompts_are_cleaned_as_published(folder, checkpoint):
    clip = made(folder, checkpoint).clip
    assert np.array_equal(clip.text("a “cat” ’s &amp;quot;dog"), clip.text('a "cat" \'s "dog'))
    assert not np.array_equal(clip.text("cat"), clip.text("dog"))


@pytest.mark.parametrize(("change", "message"), [
    (lambda w: w.pop("visual.transformer.resblocks.1.attn.in_proj_bias"),
     "missing visual.transformer.resblocks.1.attn.in_proj_bias"),
    (lambda w: w.update({"score_predictor.weight": torch.zeros(1)}), "unexpected score_predictor.weight"),
    (lambda w: w.update({f"module.{key}": w.pop(key) for key in list(w)}), "missing ln_final.bias, .* more; unexpected mod"),
    (lambda w: w.update({"visual.proj": torch.zeros(32, 8)}),
     r"of another shape visual.proj \[32, 8\], where visual_projection.weight is \[20, 32\]"),
    (lambda w: w.update({"transformer.resblocks.0.attn.in_proj_weight": torch.zeros(70, 24)}),
     r"of another shape transformer.resblocks.0.attn.in_proj_weight \[70, 24\]"),
])
def test_checkpoints_that_are_something_else(folder, checkpoint, change, message):
    loaded = torch.load(checkpoint)
    change(loaded["state_dict"])
    torch.save(loaded, checkpoint)
    with pytest.raises(RewardError, match=f"reward hpsv2: option checkpoint: .*HPS.pt.*{message}"):
        made(folder, checkpoint)


def test_the_self_test_catches_a_model_with_the_wrong_order(folder, checkpoint, model, tmp_path):
    weights = model.state_dict() | {"text_projection": -model.text_projection.data}
    torch.save(weights, tmp_path / "negated.pt")
    both = [made(folder, path) for path in (checkpoint, tmp_path / "negated.pt")]
    case = both[0].self_test_case()
    right, wrong = sorted(both, key=lambda r: -np.subtract(*r.score(case.images, case.prompts, [{}] * 2)["hpsv2"]))
    right.self_test()
    with pytest.raises(RewardError, match="known images should score from high to low"):
        wrong.self_test()


def test_what_is_not_there_is_named(folder, checkpoint, tmp_path):
    with pytest.raises(RewardError, match="option checkpoint: 'xswu/HPSv2/HPS_v2.1_compressed.pt' cannot be loaded"):
        rewards.get("hpsv2", config=str(folder), processor=str(folder))
    with pytest.raises(RewardError, match="option checkpoint: there is no file .*/absent.pt'"):
        made(folder, tmp_path / "absent.pt")
    with pytest.raises(RewardError, match="option processor: 'laion/CLIP-ViT-H-14-laion2B-s32B-b79K' cannot be loaded"):
        rewards.get("hpsv2", checkpoint=str(checkpoint), config=str(folder))
    with pytest.raises(RewardError, match="option config: 'nobody/none' cannot be loaded"):
        rewards.get("hpsv2", checkpoint=str(checkpoint), config="nobody/none", processor=str(folder))


def test_the_default_architecture_is_vit_h_14():
    """986 million weights and a text tower of 354 million, as published; its names are those of the checkpoint."""
    config = hpsv2._architecture(None)
    assert isinstance(config, CLIPConfig)
    with torch.device("meta"):
        weights = dict(CLIPModel(config).named_parameters())
    count = {prefix: sum(w.numel() for key, w in weights.items() if key.startswith(prefix)) for prefix in ("", "text_")}
    assert count == {"": 986_109_441, "text_": 354_032_640}
    assert weights["vision_model.embeddings.position_embedding.weight"].shape == (257, 1280)
    assert config.text_config.hidden_act == config.vision_config.hidden_act == "gelu"
    names = {hpsv2._open_clip_name(key) for key in weights}
    block = ("ln_1", "ln_2", "attn.out_proj", "mlp.c_fc", "mlp.c_proj")
    wanted = {f"{tower}.resblocks.{i}.{part}.{kind}"
              for (tower, layers), part, kind in itertools.product(
                  (("transformer", 24), ("visual.transformer", 32)), block, ("weight", "bias")) for i in range(layers)}
    wanted |= {f"{tower}.resblocks.{i}.attn.in_proj_{kind}"
               for tower, layers in (("transformer", 24), ("visual.transformer", 32)) for i in range(layers)
               for kind in ("weight", "bias")}
    wanted |= {"positional_embedding", "text_projection", "logit_scale", "token_embedding.weight", "ln_final.weight",
               "ln_final.bias", "visual.class_embedding", "visual.positional_embedding", "visual.proj", "visual.conv1.weight",
               "visual.ln_pre.weight", "visual.ln_pre.bias", "visual.ln_post.weight", "visual.ln_post.bias"}
    assert names == wanted
