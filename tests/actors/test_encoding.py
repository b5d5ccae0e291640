"""Prompts per encode call: many if encoders are offloaded. Evaluation prompts: once in a run."""

from __future__ import annotations

import logging
from collections import Counter

import pytest
from fake_ray import Handle, install
from ray.exceptions import ObjectLostError

from actors.evaluation import KeptConditionings, start_evaluation
from actors.pool import ActorPool
from actors.process import Process
from actors.sampling import MAX_PROMPTS, Sampling
from flowgrpo_ray.config import load
from flowgrpo_ray.data.plan import plan_evaluation
from flowgrpo_ray.data.prompts import PromptRecord
from flowgrpo_ray.data.trajectory import EncodeMeta, SampleMeta
from flowgrpo_ray.errors import FlowGrpoError

SIZE = 100  # bytes of a conditioning
RECORDS = [PromptRecord(f"prompt {number}") for number in range(10)]


def config_of(**more):
    return load(None, {"rewards": {"jpeg_compressibility": {}}, "eval.micro_batch": 4, **more})


class Scored:
    """Scoring that is done at once."""

    of_images = ("jpeg_compressibility",)

    def submit(self, what, order, images, records, on_scores, *, rewards):
        on_scores((what, [record.prompt for record in records]))


class Site:
    """Rollout actors that a test plays; `lost` conditionings cannot be fetched."""

    always_lost = False

    def __init__(self, config, actors: int = 2, family: str = "sd3") -> None:
        self.config, self.handles, self.encoded, self.lost = config, [], [], set()
        self.pool = ActorPool(
            "rollout",
            actors,
            self.spawn,
            start_timeout_s=60,
            max_deaths=4,
        )
        self.sampling = Sampling(config, self.pool, family)
        self.play()

    def spawn(self, index, incarnation):
        self.handles.append(Handle(self.does))
        return self.handles[-1]

    def does(self, method, *args):
        if method == "encode":
            self.encoded.append([record.prompt for record in args[0]])
            return EncodeMeta(1.0, (SIZE,) * len(args[0]))
        if method == "sample" and (self.always_lost or self.lost & set(args[2:])):
            raise ObjectLostError("00" * 28, None, "")
        if method == "sample":
            return SampleMeta(0, "", 0.0, 0.0, pngs=(b"",) * len(args[0].png))
        return Process(1, "10.0.0.1")

    def play(self):
        while any(handle.calls for handle in self.handles):
            for handle in self.handles:
                if handle.calls:
                    call = handle.calls.pop(0)
                    call.end()
                    self.pool.settle({call.refs[0]})

    def evaluate(self, kept):
        self.encoded.clear()
        run = start_evaluation(
            self.config, RECORDS, "policy", 0, "run", self.sampling, Scored(), kept
        )
        self.play()
        assert run.finished
        kept.tell(len(RECORDS))
        return Counter(prompt for prompts in self.encoded for prompt in prompts)


@pytest.fixture(autouse=True)
def without_ray(monkeypatch):
    install(monkeypatch)


@pytest.mark.parametrize(
    ("offload", "prompts", "sizes"),
    [
        (False, 10, [1] * 10),
        (True, 10, [5, 5]),
        (True, 1, [1]),
        (True, 0, []),
        (True, 301, [64] * 4 + [45]),
    ],
)
def test_offloaded_encoders_take_many_prompts_in_a_call(offload, prompts, sizes):
    site = Site(config_of(**{"model.offload_encoders": offload}))
    refs = {}
    site.sampling.encode(
        [PromptRecord(str(n)) for n in range(prompts)],
        [(n,) for n in range(prompts)],
        lambda number, ref, nbytes: refs.update({number: (ref, nbytes)}),
    )
    site.play()
    assert (
        sorted(map(len, site.encoded), reverse=True) == sizes
        and max(sizes, default=0) <= MAX_PROMPTS
    )
    assert sorted(refs) == list(range(prompts)) and all(
        nbytes == SIZE for _, nbytes in refs.values()
    )
    assert len({id(ref) for ref, _ in refs.values()}) == prompts


@pytest.mark.parametrize("images", [1, 3])
def test_evaluation_prompts_are_encoded_once_in_a_run(images, caplog):
    site, kept = Site(config_of(**{"eval.images_per_prompt": images})), KeptConditionings(1000)
    with caplog.at_level(logging.DEBUG):
        assert site.evaluate(kept) == {record.prompt: 1 for record in RECORDS}
        assert not site.evaluate(kept) and not site.evaluate(kept)
    assert len(kept) == 10 and kept.nbytes == 1000
    assert [r.message for r in caplog.records if "kept" in r.message] == [
        "evaluation: the conditionings of 10 of 10 prompts are kept, 0.0 MB"
    ]


def test_what_is_beyond_the_budget_is_encoded_again(caplog):
    site, kept = Site(config_of(**{"eval.images_per_prompt": 2})), KeptConditionings(450)
    with caplog.at_level(logging.INFO):
        first = site.evaluate(kept)
    assert Counter(first.values()) == {1: 4, 2: 6}, (
        "one at a time is held of what there is no room for"
    )
    assert Counter(site.evaluate(kept).values()) == {2: 6} and kept.nbytes == 400
    assert "4 of 10 prompts are kept" in caplog.text and "10% of the object store" in caplog.text


def test_what_is_lost_is_encoded_again():
    site, kept = Site(config_of()), KeptConditionings(1000)
    site.evaluate(kept)
    site.lost = {kept[0], kept[5]}  # shards hold prompts 0-3, 4-7, 8-9 (filled up)
    assert [len(shard.prompts) for shard in plan_evaluation(site.config, RECORDS)] == [4, 4, 2]
    assert sorted(site.evaluate(kept)) == [f"prompt {n}" for n in range(8)]
    assert kept.nbytes == 1000 and not site.evaluate(kept)
    site.always_lost = True
    with pytest.raises(FlowGrpoError, match="failed 3 times: ObjectLostError"):
        site.evaluate(kept)


def test_a_family_without_cfg_has_no_negative():
    for family, encoded in (("sd3", [["no words"]]), ("flux", [])):
        site = Site(config_of(), family=family)
        new = [text for text in ["no words"] if not site.sampling.has_negative(text)]
        site.sampling.encode_negatives(new)
        site.play()
        assert site.encoded == encoded and site.sampling.has_negative("no words")
        assert (site.sampling.negative("no words") is None) == (family == "flux")
        assert site.sampling.negative(None) is None
