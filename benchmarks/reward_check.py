"""Does a reward give on this GPU what it gives on the CPU, and how fast? Without Ray.

    python -m benchmarks.reward_check NAME [--option KEY=VALUE ...] [--random] [--images 32] [--size 512] [--tolerance 0.02]
                                      [--device cuda|cpu] [--small] [--json]

The reward is made twice, each time in a process of its own: one sees the GPU, the other none. Both run the self-test, score
the same drawn words on coloured grounds in one call (a second time for the clock), and then one by one. Checked are: the GPU
is used; scores of the GPU and of the CPU (half precision against float32) differ by at most `--tolerance` times the spread of
the CPU's, from lowest to highest; where the reward is declared batch_invariant, each has the same bits alone and in the call.

`--random` makes the CLIP of clipscore and pickscore at its published size with random weights, for a machine without a hub;
`--small` makes it small. `--device cpu` runs both sides without a GPU: a test of this program. Exit code 1: a check failed.
2: it could not run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from benchmarks.measure import ROOT, machine, print_machine, print_table, run_main
from flowgrpo_ray.cli.rewards import options_by_reward
from flowgrpo_ray.errors import ConfigError, FlowGrpoError, nearest

WORDS = ("RED", "OPEN", "WALK", "NORTH", "MOON", "CHAIR", "LEMON", "STORM")
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789\"'.,!?-"
# Layers, heads and widths as published: openai/clip-vit-large-patch14, and the ViT-H of PickScore.
SHAPES = {
    "clipscore": {"projection_dim": 768, "text": (768, 3072, 12, 12), "vision": (1024, 4096, 24, 16), "act": "quick_gelu"},
    "pickscore": {"projection_dim": 1024, "text": (1024, 4096, 24, 16), "vision": (1280, 5120, 32, 16), "act": "gelu"},
}
SMALL = {"projection_dim": 32, "text": (32, 64, 2, 2), "vision": (32, 64, 2, 2), "act": "gelu"}


def drawn_images(count: int, size: int) -> tuple[np.ndarray, list[str]]:
    """uint8 [n, size, size, 3], RGB, and their prompts, one in two of which is of another image."""
    from PIL import Image, ImageDraw, ImageFont

    random, images, prompts = Random(0), [], []
    for number in range(count):
        word = WORDS[number % len(WORDS)]
        image = Image.new("RGB", (size, size), tuple(random.randrange(120, 256) for _ in range(3)))
        ImageDraw.Draw(image).text((size / 2, size / 2), word, "black", ImageFont.load_default(size / 6), anchor="mm")
        images.append(np.asarray(image))
        prompts.append(f'a sign with the word "{word if number % 2 else random.choice(WORDS)}"')
    return np.stack(images), prompts


def random_clip(folder: Path, shape: dict[str, Any], size: int) -> str:
    """Write a CLIP with random weights, its preprocessing and a tokenizer of letters in transformers' layout."""
    from transformers import CLIPConfig, CLIPModel, CLIPTokenizer
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    pieces = [piece for letter in LETTERS for piece in (letter, f"{letter}</w>")] + ["<|startoftext|>", "<|endoftext|>"]
    words = CLIPTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], model_max_length=77)

    def tower(part: str) -> dict[str, Any]:
        hidden, inner, layers, heads = shape[part]
        return {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
                "hidden_act": shape["act"], "projection_dim": shape["projection_dim"]}

    tokens = {"vocab_size": len(words), "max_position_embeddings": 77, "bos_token_id": words.bos_token_id,
              "eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
    torch.manual_seed(0)
    model = CLIPModel(CLIPConfig(projection_dim=shape["projection_dim"], text_config=tower("text") | tokens,
                                 vision_config=tower("vision") | {"image_size": size, "patch_size": 14}))
    for weight in model.parameters():  # at the library's own scale all images would embed to nearly the same
        if weight.ndim >= 2:
            torch.nn.init.normal_(weight, std=weight[0].numel() ** -0.5)
    model.save_pretrained(folder)
    CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size={"height": size, "width": size}).save_pretrained(folder)
    words.save_pretrained(folder)
    return str(folder)


def side(name: str, settings: dict[str, Any], count: int, size: int, self_test: bool) -> dict[str, Any]:
    """What this process finds: scores together and alone, seconds, whether a GPU is used."""
    from flowgrpo_ray.rewards import get, validated
    from flowgrpo_ray.rewards.base import self_tested

    reward = get(name, **settings)
    if self_test:
        self_tested(reward)
    images, prompts = drawn_images(count, size)

    def score(rows: slice) -> np.ndarray:
        some = images[rows]
        result = reward.score(some, prompts[rows], [{}] * len(some), group_ids=[0] * len(some))
        return validated(result, len(some), reward.name, range=reward.range)[reward.name]

    score(slice(None))
    started = time.perf_counter()
    together = score(slice(None))
    seconds = time.perf_counter() - started
    alone = together if reward.scope == "group" else np.concatenate([score(slice(i, i + 1)) for i in range(count)])
    return {"scores": together.tolist(), "alone": alone.tolist(), "seconds": seconds, "gpu_problem": reward.gpu_problem(),
            "batch_invariant": bool(reward.batch_invariant), "notes": list(reward.notes)}


def elsewhere(see_gpu: bool, *args: Any) -> dict[str, Any]:
    """`side`, in a process that sees the GPU or none."""
    environ = os.environ if see_gpu else {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-m", "benchmarks.reward_check", "--side", json.dumps(args)], cwd=ROOT, env=environ,
                          capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise FlowGrpoError(f"{'with' if see_gpu else 'without'} the GPU: {lines[-1].removeprefix('error: ')}")
    return json.loads(done.stdout.splitlines()[-1])


def check(options: argparse.Namespace) -> dict[str, Any]:
    """Run both sides and compare them."""
    from flowgrpo_ray.rewards import reward_class

    (name, settings), = options_by_reward([options.name], options.option).items()
    on_gpu = options.device == "cuda"
    if reward_class(name).device != "any":
        raise ConfigError(f"reward {name} works on the CPU: there is nothing to check")
    if on_gpu and not torch.cuda.is_available():
        raise FlowGrpoError("torch sees no GPU; --device cpu runs both sides on the CPU")
    with tempfile.TemporaryDirectory() as folder:
        if options.random:
            if name not in SHAPES:
                raise ConfigError(f"--random makes the models of {' and '.join(SHAPES)}, not of {name}{nearest(name, SHAPES)}")
            shape, edge = (SMALL, 56) if options.small else (SHAPES[name], 224)
            settings["model"] = random_clip(Path(folder), shape, edge)
            settings |= {"processor": settings["model"]} if name == "pickscore" else {}
        args = (name, settings, options.images, options.size, not options.random)  # what is random knows no colours
        cpu, gpu = elsewhere(False, *args), elsewhere(on_gpu, *args)
    low, high = min(cpu["scores"]), max(cpu["scores"])
    difference = max(abs(a - b) for a, b in zip(cpu["scores"], gpu["scores"], strict=True))
    checks = {"the scores of both sides agree": difference <= options.tolerance * (high - low) and high > low}
    if on_gpu:
        checks["the GPU is used"] = gpu["gpu_problem"] is None
    if gpu["batch_invariant"]:
        checks["a score has the same bits alone and in a call"] = all(s["scores"] == s["alone"] for s in (cpu, gpu))
    return {"machine": machine(torch.device("cuda", 0) if on_gpu else None), "reward": name, "range_of_scores": [low, high],
            "largest_difference": difference, "images_per_s": {key: options.images / one["seconds"] for key, one in
                                                               (("cpu", cpu), (options.device, gpu))},
            "notes": gpu["notes"], "checks": checks, "ok": all(checks.values())}


def show(result: dict[str, Any]) -> None:
    print_machine(result["machine"])
    print_table(["side", "images/s"], [[key, f"{value:.1f}"] for key, value in result["images_per_s"].items()])
    low, high = result["range_of_scores"]
    print(f"reward {result['reward']}: scores from {low:.4f} to {high:.4f}, largest difference "
          f"{result['largest_difference']:.2e}")
    for note in result["notes"]:
        print(f"note: {note}")
    for what, right in result["checks"].items():
        print(f"{'ok' if right else 'FAILED':<7} {what}")


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["--side"]:
        try:
            print(json.dumps(side(*json.loads(argv[1]))))
        except FlowGrpoError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        return 0
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("name", help="a reward of `flowgrpo-ray rewards`, or module:attribute")
    p.add_argument("--option", action="append", metavar="KEY=VALUE", help="an option of the reward; repeat it for more")
    p.add_argument("--random", action="store_true", help="a CLIP of random weights, at its published size")
    p.add_argument("--small", action="store_true", help="with --random: a small one")
    p.add_argument("--images", type=int, default=32, help="images to score")
    p.add_argument("--size", type=int, default=512, help="their edge in pixels")
    p.add_argument("--tolerance", type=float, default=0.02, help="largest difference, as a share of the scores' spread")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    p.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return run_main(check, p, show, argv)


if __name__ == "__main__":
    sys.exit(main())
