"""Makes the tiny demo model from nothing: `python -m flowgrpo_ray.tiny.build_model --out DIR` (one thread, ~10 min).

Three stages: a VAE; a writer that is taught with neat images until OCR reads all that it writes; and the same writer
taught with careless images until OCR reads about 40 % of it. docs/tiny-model.md says why. The project's own OCR
reward, on words that no stage has seen, decides when a writer is done.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
from diffusers import AutoencoderKL, StableDiffusion3Pipeline
from torch import Tensor

from flowgrpo_ray.errors import ConfigError, FlowGrpoError
from flowgrpo_ray.tiny import drawing, networks, prompt_file

Score = Callable[[np.ndarray, list[str]], np.ndarray]
"""uint8 images [n, H, W, 3] and their prompts -> rewards [n] in [0, 1]."""


@dataclass(frozen=True)
class Recipe:
    """Everything that the result depends on. Steps are optimizer steps."""

    seed: int = 0
    vae_steps: int = 1600
    vae_batch: int = 16
    vae_images: int = 3000
    clean_images: int = 8000
    clean_learning_rate: float = 1.5e-3
    clean_reward: float = 0.99  # the clean writer is done when its held-out reward reaches this
    clean_first: int = 600  # steps before the first measurement,
    clean_every: int = 50  # and between two
    clean_max_steps: int = 2000
    careless_images: int = 4000
    careless_learning_rate: float = 7e-4
    careless_reward: tuple[float, float] = (0.40, 0.46)  # done at the first measurement in this range
    # On its way from neat to careless the writer first falls apart (reward 0.14 after 30 steps): that is not yet the
    # mixture of legible and illegible images that it is meant to learn.
    careless_first: int = 180
    careless_every: int = 10
    careless_max_steps: int = 400
    scribbled: float = 0.62
    misspelt: float = 0.20
    batch: int = 32
    no_caption: float = 0.10  # share of empty captions, so that classifier-free guidance means something
    measured_repeats: int = 4  # images of each held-out prompt in a measurement


def read_words(name: str) -> list[str]:
    """The quoted words of a shipped prompt file."""
    return [line.split('"')[1] for line in prompt_file(name).read_text().splitlines()]


def word_source(rng: Random) -> Iterator[str]:
    """Endless training words: half from train.txt, half random letters, none that is held out."""
    train, held_out = read_words("train.txt"), set(read_words("heldout_long.txt"))
    while True:
        word = rng.choice(train) if rng.random() < 0.5 else drawing.random_word(rng)
        if word not in held_out:
            yield word


def to_tensor(images: list[np.ndarray]) -> Tensor:
    """uint8 [H, W, 3] images -> float32 [n, 3, H, W] in [-1, 1]."""
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 127.5 - 1


def train_vae(recipe: Recipe) -> AutoencoderKL:
    """L1 + L2 + a little KL on random square crops; the decoder sees latents with 5 % noise, as after sampling."""
    torch.manual_seed(recipe.seed)
    rng = Random(recipe.seed)
    vae = networks.autoencoder().train()
    words = word_source(rng)
    images = to_tensor([drawing.practice_page(next(words), rng) for _ in range(recipe.vae_images)])
    optimizer = torch.optim.AdamW(vae.parameters(), weight_decay=1e-4, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, recipe.vae_steps, pct_start=0.1)
    started = time.monotonic()
    for step in range(1, recipe.vae_steps + 1):
        left = rng.randint(0, drawing.WIDTH - drawing.HEIGHT)
        x = images[torch.randint(len(images), (recipe.vae_batch,))][..., left:left + drawing.HEIGHT]
        if rng.random() < 0.3:
            x = (x + 0.15 * torch.randn_like(x[:, :1])).clamp(-1, 1)
        posterior = vae.encode(x).latent_dist
        spread = posterior.mean.detach().std()
        error = vae.decode(posterior.mean + 0.05 * spread * torch.randn_like(posterior.mean)).sample - x
        loss = error.abs().mean() + error.square().mean() + 1e-4 * posterior.kl().mean() / x[0].numel()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            say(f"vae: step {step}, loss {loss.item():.4f}", started)
    vae.eval()
    with torch.no_grad():
        latents = vae.encode(images[:256]).latent_dist.mean
    vae.register_to_config(scaling_factor=1 / latents.std().item(), shift_factor=latents.mean().item())
    return vae


class Teacher:
    """Flow matching on (caption, image) pairs: trains a pipeline's transformer and both text encoders together.

    x_sigma = (1 - sigma) x_0 + sigma noise, and the transformer learns noise - x_0. Measured and saved weights are an
    exponential moving average (0.995) of the trained ones.
    """

    def __init__(self, pipe: StableDiffusion3Pipeline, words: list[str], images: list[np.ndarray], *,
                 learning_rate: float, recipe: Recipe) -> None:
        self.pipe, self.recipe, self.learning_rate, self.step = pipe, recipe, learning_rate, 0
        self.encoders = (pipe.text_encoder, pipe.text_encoder_2)
        self.weights = [w for m in (pipe.transformer, *self.encoders) for w in m.requires_grad_(True).parameters()]
        self.average = [w.detach().clone() for w in self.weights]
        self.optimizer = torch.optim.AdamW(self.weights, lr=learning_rate, weight_decay=0.01, betas=(0.9, 0.98))
        self.tokens = self._tokenize([drawing.prompt_of(word) for word in words])
        self.empty = self._tokenize([""])[0]
        shift, scale = pipe.vae.config.shift_factor, pipe.vae.config.scaling_factor
        with torch.no_grad():
            self.latents = torch.cat([
                (pipe.vae.encode(to_tensor(images[i:i + 100])).latent_dist.mean - shift) * scale
                for i in range(0, len(images), 100)])

    def _tokenize(self, captions: list[str]) -> Tensor:
        return self.pipe.tokenizer(captions, padding="max_length", max_length=networks.MAX_TOKENS, truncation=True,
                                   return_tensors="pt").input_ids

    def _encode(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """[m, 18] ids -> embeddings [m, 19, 128], pooled [m, 128]: the pipeline's own at max_sequence_length 1."""
        outputs = [encoder(tokens, output_hidden_states=True) for encoder in self.encoders]
        embeddings = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
        no_t5 = torch.zeros_like(embeddings[:, :1])
        return torch.cat([embeddings, no_t5], dim=1), torch.cat([output.text_embeds for output in outputs], dim=-1)

    def train_step(self) -> float:
        """One update; returns its loss."""
        batch = self.recipe.batch
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * min(1, self.step / 50)
        chosen = torch.randint(len(self.latents), (batch,))
        x0, tokens = self.latents[chosen], self.tokens[chosen].clone()
        tokens[torch.rand(batch) < self.recipe.no_caption] = self.empty
        # Mostly the middle of the schedule, moved towards the noisy end, where the letters are decided.
        sigma = torch.where(torch.rand(batch) < 0.7, torch.randn(batch).sigmoid(), torch.rand(batch))
        sigma = 2 * sigma / (1 + sigma)
        noise = torch.randn_like(x0)
        s = sigma.view(-1, 1, 1, 1)
        embeddings, pooled = self._encode(tokens)
        velocity = self.pipe.transformer((1 - s) * x0 + s * noise, encoder_hidden_states=embeddings,
                                         pooled_projections=pooled, timestep=1000 * sigma, return_dict=False)[0]
        loss = (velocity - (noise - x0)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        decay = min(0.995, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            for average, weight in zip(self.average, self.weights, strict=True):
                average.lerp_(weight, 1 - decay)
        self.step += 1
        return loss.item()

    def swap(self) -> None:
        """Exchange the trained weights and their average."""
        for i, weight in enumerate(self.weights):
            weight.data, self.average[i] = self.average[i], weight.data


@torch.no_grad()
def measure(pipe: StableDiffusion3Pipeline, prompts: list[str], score: Score, *, seed: int, repeats: int = 1,
            guidance: float = 1.0) -> np.ndarray:
    """Rewards [repeats * prompts] of the stock pipeline's images: 8 steps without noise, no T5 tokens but one."""
    generator = torch.Generator().manual_seed(seed)
    rewards = []
    for _ in range(repeats):
        for i in range(0, len(prompts), 32):
            rewards.append(score(paint(pipe, prompts[i:i + 32], generator, guidance=guidance), prompts[i:i + 32]))
    return np.concatenate(rewards)


@torch.no_grad()
def paint(pipe: StableDiffusion3Pipeline, prompts: list[str], generator: torch.Generator, *,
          guidance: float = 1.0) -> np.ndarray:
    """uint8 [n, 32, 64, 3], one image per prompt."""
    images = pipe(prompts, height=drawing.HEIGHT, width=drawing.WIDTH, num_inference_steps=8, guidance_scale=guidance,
                  max_sequence_length=1, generator=generator, output_type="np").images
    return (images * 255).round().astype(np.uint8)


def teach(teacher: Teacher, name: str, score: Score, *, done: Callable[[float], bool], first: int, every: int,
          max_steps: int) -> float:
    """Train until `done(held-out reward)`, which is asked after `first` steps and then every `every` steps.

    The pipeline then holds the averaged weights. Returns the reward.

    Raises:
        FlowGrpoError: not done after `max_steps`.
    """
    started, reward = time.monotonic(), float("nan")
    prompts = prompt_file("heldout.txt").read_text().splitlines()
    losses: list[float] = []
    while teacher.step < max_steps:
        losses.append(teacher.train_step())
        if teacher.step < first or (teacher.step - first) % every:
            continue
        teacher.swap()
        rewards = measure(
            teacher.pipe, prompts, score, seed=teacher.recipe.seed, repeats=teacher.recipe.measured_repeats)
        reward = float(rewards.mean())
        say(f"{name}: step {teacher.step}, loss {np.mean(losses[-50:]):.4f}, held-out reward {reward:.3f}, "
            f"exact {np.mean(rewards == 1):.3f}", started)
        if done(reward):
            return reward
        teacher.swap()
    raise FlowGrpoError(f"the {name} writer is not done after {max_steps} steps: its held-out reward is {reward:.3f}")


def train_clean(vae: AutoencoderKL, recipe: Recipe, score: Score) -> StableDiffusion3Pipeline:
    """A writer whose held-out words OCR reads without error (`clean_reward`)."""
    torch.manual_seed(recipe.seed + 1)
    rng = Random(recipe.seed + 1)
    source = word_source(rng)
    words = [next(source) for _ in range(recipe.clean_images)]
    pipe = networks.pipeline(vae)
    pipe.set_progress_bar_config(disable=True)
    teacher = Teacher(pipe, words, [drawing.neat(word, rng) for word in words],
                      learning_rate=recipe.clean_learning_rate, recipe=recipe)
    teach(teacher, "clean", score, done=lambda reward: reward >= recipe.clean_reward, first=recipe.clean_first,
          every=recipe.clean_every, max_steps=recipe.clean_max_steps)
    return pipe


def spoil(pipe: StableDiffusion3Pipeline, recipe: Recipe, score: Score) -> StableDiffusion3Pipeline:
    """Teach a clean writer with careless images until its held-out reward lies in `careless_reward`."""
    torch.manual_seed(recipe.seed + 2)
    rng = Random(recipe.seed + 2)
    source = word_source(rng)
    words = [next(source) for _ in range(recipe.careless_images)]
    images = [drawing.careless(word, rng, recipe.scribbled, recipe.misspelt) for word in words]
    teacher = Teacher(pipe, words, images, learning_rate=recipe.careless_learning_rate, recipe=recipe)
    low, high = recipe.careless_reward
    teach(teacher, "careless", score, done=lambda reward: low <= reward <= high, first=recipe.careless_first,
          every=recipe.careless_every, max_steps=recipe.careless_max_steps)
    return pipe


def build(out: Path, work: Path, recipe: Recipe, score: Score) -> None:
    """Run the stages that `work` does not hold yet, and write the fp16 pipeline to `out`.

    `work` keeps the VAE (vae/) and the clean writer (clean/); each stage is seeded on its own, so a build that starts
    from them makes the same model.
    """
    if (work / "vae").is_dir():
        vae = AutoencoderKL.from_pretrained(work / "vae")
    else:
        vae = train_vae(recipe)
        vae.save_pretrained(work / "vae")
    if not (work / "clean").is_dir():
        networks.save(train_clean(vae.requires_grad_(False), recipe, score), work / "clean", torch.float32)
    networks.save(spoil(networks.load(work / "clean"), recipe, score), out, torch.float16)


def report(folder: Path, score: Score, *, seed: int, guidance: float = 1.0) -> dict[str, float]:
    """Bytes of a saved pipeline, and mean reward and exact share on each shipped prompt file, one image a prompt."""
    pipe = networks.load(folder)
    result: dict[str, float] = {"bytes": sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())}
    for name in ("train", "heldout", "heldout_long"):
        prompts = prompt_file(f"{name}.txt").read_text().splitlines()
        rewards = measure(pipe, prompts, score, seed=seed, guidance=guidance)
        result |= {f"{name}_reward": round(float(rewards.mean()), 3),
                   f"{name}_exact": round(float(np.mean(rewards == 1)), 3)}
    return result


def ocr_score() -> Score:
    """The project's OCR reward in the mode that the demo uses."""
    from flowgrpo_ray import rewards

    reward = rewards.get("ocr", mode="recognition", normalize="alnum")

    def score(images: np.ndarray, prompts: list[str]) -> np.ndarray:
        return np.asarray(next(iter(reward.score(images, prompts, [{} for _ in prompts]).values())))

    return score


def say(text: str, started: float) -> None:
    print(f"{text} ({time.monotonic() - started:.0f} s)", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the pipeline; must be empty or absent")
    parser.add_argument("--work", type=Path, help="folder that keeps the VAE and the clean writer (default: OUT.work)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.out.exists() and any(options.out.iterdir()):
        raise ConfigError(f"--out {options.out} is not empty; name a new folder")
    work = options.work or options.out.with_name(options.out.name + ".work")
    torch.set_num_threads(1)  # results depend on the number of threads, and two busy ones wait for each other
    started, score = time.monotonic(), ocr_score()
    build(options.out, work, Recipe(seed=options.seed), score)
    say("done", started)
    print(json.dumps(report(options.out, score, seed=options.seed + 3), indent=2))


if __name__ == "__main__":
    main()
