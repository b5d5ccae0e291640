"""Every kind of reward by name, each on a real actor: its faults are missing scores, and pixels reach it as they were."""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import pytest
import ray
import tiny_image_reward
import tiny_rewards
from answering import serving
from faulty_kinds import ACTOR, COLOUR, MODEL, marked
from marked_servers import Chat, Marked, Rewards
from PIL import Image
from recording_kinds import recorded
from scoring_bench import Bench, config_of

from flowgrpo_ray import rewards
from flowgrpo_ray.data.prompts import PromptRecord
from flowgrpo_ray.rewards.image_reward_package import INSTALL
from flowgrpo_ray.rewards.registry import known_rewards

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

HTTP = {"timeout_s": 3.0, "retries": 1, "backoff_s": 0.05}


@dataclass
class Kind:
    """One entry of the registry under test."""

    kind: str
    faults: tuple[str, ...] = ACTOR
    options: dict[str, Any] = field(default_factory=dict)
    prompt: str = "a red dog"
    metadata: dict[str, Any] = field(default_factory=dict)
    images: Callable[[int], np.ndarray] = None
    service: Marked | None = None
    in_groups: bool = False  # a shard for each image of a group

    @property
    def record(self) -> PromptRecord:
        return PromptRecord(self.prompt, metadata=self.metadata)

    @cached_property
    def reward(self) -> rewards.Reward:
        """The built-in class in this process; of a function, the function."""
        own = self.kind in ("function", "group")
        return rewards.get(f"faulty_kinds:{self.kind}" if own else self.kind, **self.options)

    def direct(self, images: np.ndarray) -> np.ndarray:
        """Scores without any actor."""
        n = len(images)
        return self.reward.score(images, [self.prompt] * n, [self.metadata] * n, group_ids=[0] * n)[self.kind]


def noise(seed: int) -> np.ndarray:
    """Three images, of three levels of red."""
    images = np.random.default_rng(seed).integers(0, 200, (3, 64, 64, 3), np.uint8)
    images[..., 0] //= np.array([1, 2, 3], np.uint8)[:, None, None]
    return images


def png_url(image: np.ndarray) -> str:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


RED = np.zeros((64, 64, 3), np.uint8)
RED[..., 0] = 255
# Cells of 32 x 16 pixels, the first of them black: a turned or mirrored board is another one.
BOARD = np.repeat(np.indices((64, 64))[0, ..., None] // 32 + np.indices((64, 64))[1, ..., None] // 16, 3, axis=2) % 2 * 255
BOARD = BOARD.astype(np.uint8)
DOG = {"tag": "colors", "include": [{"class": "dog", "count": 1, "color": "red"}]}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Kind]:
    """Kinds with a network of torch."""
    if importlib.util.find_spec("ImageReward") is None:
        pytest.skip(f"image-reward is not installed: {INSTALL}")
    options = tiny_rewards.build(tmp_path_factory.mktemp("models"))
    kinds = {kind: Kind(kind, (*ACTOR, *MODEL), options[kind], images=noise) for kind in options}
    kinds["image_similarity"].metadata = {"image": png_url(RED)}
    kinds["geneval"].metadata, kinds["geneval"].faults = DOG, (*ACTOR, *MODEL, *COLOUR)
    return kinds


@pytest.fixture
def small_vit(monkeypatch):
    """image_reward can be built in this process, too."""
    monkeypatch.setattr(tiny_image_reward.package()[1], "create_vit", tiny_image_reward.small_vit)


def words(seed: int) -> np.ndarray:
    """Images that ocr reads: OPEN, WALK, OPEN."""
    return rewards.get("ocr", mode="recognition").self_test_case().images[[0, 1, 0]]


def readers() -> dict[str, Kind]:
    options, prompt = {"mode": "recognition"}, 'a sign that says "OPEN"'
    return {"ocr": Kind("ocr", options=options, prompt=prompt, images=words),
            "video_ocr": Kind("video_ocr", options=options, prompt=prompt, images=lambda seed: words(seed)[:, None])}


def formulas() -> dict[str, Kind]:
    """Kinds without a model or a server."""
    return {kind: Kind(kind, images=noise) for kind in ("jpeg_compressibility", "jpeg_incompressibility", "function")} | {
        "group": Kind("group", images=noise, in_groups=True)}


def served(stack: contextlib.ExitStack) -> tuple[dict[str, Kind], list]:
    """(kinds behind HTTP, their servers)."""
    kinds = {
        "remote": Kind("remote", service=Rewards()), "deqa": Kind("deqa", service=Rewards("deqa", low=1.0, high=5.0)),
        "geneval-server": Kind("geneval", service=Rewards("geneval"), metadata=DOG),
        "remote_group": Kind("remote_group", service=Rewards(scope="group"), in_groups=True),
        "vlm_judge": Kind("vlm_judge", service=Chat('{"score": %s}')),
        "unified_reward": Kind("unified_reward", service=Chat("It is fine.\nFinal Score: %s")),
        "qwen_vl": Kind("qwen_vl", service=Chat("Well lit.\nScore: %s")),
        "vlm_preference": Kind("vlm_preference", service=Chat(None), in_groups=True),
    }
    servers = []
    for name, kind in kinds.items():
        server = stack.enter_context(serving(kind.service))
        servers.append(server)
        chat = isinstance(kind.service, Chat)
        kind.options = {"base_url" if chat else "url": f"{server.url}/v1" if chat else server.url, **HTTP}
        kind.images = noise
        if name not in ("remote", "vlm_judge"):  # those are in test_scoring_http.py
            outside = ("http_outside",) if kind.kind in ("deqa", "geneval") else ()
            kind.faults = (*ACTOR, *kind.service.FAULTS, *outside)
    return kinds, servers


def test_no_kind_is_left_out(models):
    with contextlib.ExitStack() as stack:
        kinds = [*models.values(), *readers().values(), *formulas().values(), *served(stack)[0].values()]
    assert {kind.kind for kind in kinds} >= set(known_rewards())


class Problems(dict[str, str]):
    """What is wrong, by what was looked at: all of it is said at once."""

    @contextlib.contextmanager
    def of(self, what: str) -> Iterator[None]:
        try:
            yield
        except AssertionError as error:
            self[what] = " ".join(str(error).split())[:200]

    def __str__(self) -> str:
        return "\n".join(f"{what}: {text}" for what, text in self.items())


# Faults ---------------------------------------------------------------------------------------------------------------

class KindsBench(Bench):
    """Batches of each kind by itself."""

    def submit_to(self, name: str, kind: Kind, images: np.ndarray, number: int) -> tuple[str, int]:
        parts = np.split(images, len(images)) if kind.in_groups else [images]
        key = (name, number)
        self.results[key] = dict.fromkeys(range(len(parts)))
        for shard, part in enumerate(parts):
            self.scoring.submit(
                f"{name} {number} shard {shard}", (number, name, shard), ray.put(part), [kind.record] * len(part),
                lambda scores, shard=shard: self.results[key].__setitem__(shard, scores),
                rewards=[name], groups=[(number, len(parts))])
        return key

    def collect(self) -> None:
        self.drive(lambda: all(scores for shards in self.results.values() for scores in shards.values()))

    def scores(self, key: tuple[str, int], name: str) -> tuple[np.ndarray, np.ndarray]:
        """(scores, valid) of a batch."""
        shards = list(self.results[key].values())
        return np.concatenate([s.scores[name] for s in shards]), np.concatenate([s.valid for s in shards])


def started(kinds: dict[str, Kind], module: str | None = None) -> KindsBench:
    """Actors of the kinds themselves, or of the classes that a module makes of them."""
    config = config_of({name: {
        **({"python": f"{module}:{kind.kind}"} if module else {"type": kind.kind}), "options": kind.options,
        "timeout_s": 10.0, "max_failure_rate": 1.0, "self_test": False} for name, kind in kinds.items()})
    return KindsBench(config, start_timeout_s=240, max_deaths=12)


def check_faults(kinds: dict[str, Kind], servers: list = ()) -> None:
    """A sound batch, one of three images for each fault with the second image marked, and another sound one."""
    batches = {}
    for name, kind in kinds.items():
        batches[name] = [(fault, kind.images(number)) for number, fault in enumerate((None, *kind.faults, None))]
    with started(kinds, "faulty_kinds") as bench:
        keys = [bench.submit_to(name, kinds[name], marked(images, 1, fault) if fault else images, number)
                for name, of_kind in batches.items() for number, (fault, images) in enumerate(of_kind)]
        bench.collect()
        counts, pools = dict(bench.scoring.counts), {name: +pool.counts for name, pool in bench.pools.items()}
        problems = Problems()
        for name, kind in kinds.items():
            right = [] if kind.in_groups else [0, 2]
            for number, (fault, images) in enumerate(batches[name]):
                with problems.of(f"{name}, {fault}"):
                    scores, valid = bench.scores((name, number), name)
                    wanted = np.isin(np.arange(3), right) if fault else np.ones(3, bool)
                    assert np.isnan(scores).tolist() == (~wanted).tolist(), f"no score is no 0: {scores}"
                    assert valid.tolist() == wanted.tolist()
                    if wanted.any():
                        np.testing.assert_allclose(scores[wanted], kind.direct(images[wanted]), rtol=1e-5, atol=1e-6)
            with problems.of(f"{name}, counts"):
                assert counts[f"failures/{name}"] == len(kind.faults) * (3 - len(right)), "failures"
                assert counts[f"retries/{name}"] == len(kind.faults), "retries"
                # A batch and then its image alone, each of which has to kill two actors, or to run out of time once.
                assert pools[name]["deaths"] in (4, 5, 6) and pools[name]["timeouts"] == 2, f"{pools[name]}"
        for server in servers:
            server.stop()
        keys = [bench.submit_to(name, kind, kind.images(99), 99) for name, kind in kinds.items() if kind.service]
        bench.collect()
        for name, number in keys:
            with problems.of(f"{name}, its server is gone"):
                scores, valid = bench.scores((name, number), name)
                assert np.isnan(scores).all() and not valid.any(), f"{scores}"
                assert bench.scoring.counts[f"failures/{name}"] == counts[f"failures/{name}"] + 3, "failures"
    assert not problems, f"\n{problems}"


def test_faults_of_models_mask_their_image_and_are_counted(models, small_vit, ray_cluster):
    check_faults(models)


def test_faults_of_the_other_kinds_mask_their_image_or_group_and_are_counted(ray_cluster):
    with contextlib.ExitStack() as stack:
        kinds, servers = served(stack)
        check_faults(readers() | formulas() | kinds, servers)


# Pixels ---------------------------------------------------------------------------------------------------------------

PATTERNS = np.stack([BOARD, RED])
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
OPENAI = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))


def cells(image: np.ndarray) -> np.ndarray:
    """The middles of the board's cells, [2, 4, 3], of an image [H, W, 3] of any size."""
    height, width = image.shape[:2]
    rows, columns = (np.arange(2) + 0.5) / 2 * height, (np.arange(4) + 0.5) / 4 * width
    return image[np.ix_(rows.astype(int), columns.astype(int))].astype(float)


def shown(pixels: np.ndarray, constants: tuple) -> np.ndarray:
    """A network's input, [3, S, S], as an image of 0 to 255, [S, S, 3]."""
    mean, std = map(np.array, constants)
    return (pixels.transpose(1, 2, 0) * std + mean) * 255


def same(found: list[np.ndarray], images: list[np.ndarray]) -> None:
    """Within what resizing does: the middles of cells keep their colours."""
    np.testing.assert_allclose(list(map(cells, found)), list(map(cells, images)), atol=6)


def test_pixels_reach_every_kind_as_they_left_the_sampler(models, ray_cluster, tmp_path):
    """A black and white board and a red image: in place, red first, and from 0 to 255."""
    frames = np.full((2, 5, 64, 64, 3), 90, np.uint8)  # of which the first and the fifth are read
    frames[:, 0], frames[:, 4] = PATTERNS, 255 - PATTERNS
    with contextlib.ExitStack() as stack:
        behind_http, _ = served(stack)
        here = {**models, **readers(), **{name: kind for name, kind in formulas().items() if "jpeg" in name}}
        for name in here:
            (tmp_path / name).mkdir()
        here = {name: replace(kind, options=kind.options | {"folder": str(tmp_path / name)}) for name, kind in here.items()}
        for kinds, module in ((here, "recording_kinds"), (behind_http, None)):
            with started(kinds, module) as bench:
                keys = [bench.submit_to(name, kind, frames if name == "video_ocr" else PATTERNS, 0)
                        for name, kind in kinds.items()]
                bench.collect()
                for key in keys:
                    assert bench.scores(key, key[0])[1].all(), f"{key[0]} has no scores"
    seen = {name: partial(recorded, str(tmp_path / name)) for name in here}
    problems, in_bgr = Problems(), PATTERNS[..., ::-1]
    for name in models:
        with problems.of(name):
            images = [*PATTERNS, *([RED] if name == "image_similarity" else [])]  # its reference comes last
            constants = IMAGENET if name == "geneval" else OPENAI
            same([shown(pixels, constants) for pixels in seen[name]("network")[-len(images):]], images)
    with problems.of("geneval, colours"):  # of the dogs that are cut out: they fill the images
        same([shown(pixels, OPENAI) for pixels in seen["geneval"]("second")[-2:]], PATTERNS)
    with problems.of("ocr"):
        assert np.array_equal(seen["ocr"]("reader"), in_bgr)
    with problems.of("video_ocr"):
        assert np.array_equal(seen["video_ocr"]("reader"), [in_bgr[0], 255 - in_bgr[0], in_bgr[1], 255 - in_bgr[1]])
    for name in ("jpeg_compressibility", "jpeg_incompressibility"):
        with problems.of(name):
            np.testing.assert_allclose(seen[name]("file"), PATTERNS.astype(float), atol=3)
    for name, kind in behind_http.items():
        with problems.of(name):
            came, sent = ({image.tobytes() for image in images} for images in (kind.service.seen, PATTERNS))
            same_ones = came == sent
            assert same_ones, f"{len(came - sent)} of {len(came)} images are others"
    assert not problems, f"\n{problems}"
