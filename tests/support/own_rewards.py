"""Rewards as a user writes them: functions, one of whole groups, and some that go wrong on one marked image."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
import zlib

import numpy as np

from flowgrpo_ray.rewards import Option, Reward, RewardError, SelfTest

VICTIM = (201, 7, 99)  # the first pixel of the image that goes wrong


def brightness(images, prompts, metadata, *, scale=1.0):
    """Mean of all pixels."""
    return images.reshape(len(images), -1).mean(axis=1) / 255 * scale


def length(images, prompts, metadata):
    """Characters of the prompt, and the images as a second score."""
    return {"characters": [float(len(p)) for p in prompts], "wide": [float(i.shape[1]) for i in images]}


def rank_in_group(images, prompts, metadata, group_ids):
    """Place of an image in its group by brightness, 0 to 1; needs the whole group."""
    assert len(set(group_ids)) == 1 and len(images) > 1
    return np.argsort(np.argsort(brightness(images, prompts, metadata))) / (len(images) - 1)


rank_in_group.scope = "group"
rank_in_group.range = (0.0, 1.0)


def threads(images, prompts, metadata):
    """Threads that numeric libraries get here: by torch, and by the environment."""
    import torch

    return {"threads": [torch.get_num_threads()] * len(images), "omp": [float(os.environ["OMP_NUM_THREADS"])] * len(images)}


class Limited(Reward):
    """Takes two images at once, as its option says."""

    name = "limited"
    range = (0.0, 255.0)
    batch_invariant = True
    options = {"batch_size": Option(2, "Images at once", kind=int, minimum=1)}

    def self_test_case(self):
        return SelfTest(np.zeros((2, 8, 8, 3), np.uint8), ("", ""), ordered=False)

    def score(self, images, prompts, metadata, *, group_ids=None):
        return {"limited": brightness(images, prompts, metadata), "together": np.full(len(images), float(len(images)))}


def fillable(images, prompts, metadata):
    """Brightness, and how many images the call had."""
    return {"fillable": brightness(images, prompts, metadata), "batch": np.full(len(images), float(len(images)))}


fillable.batch_invariant = True


def fillable_faulty(images, prompts, metadata):
    """The same, but for the marked image."""
    if (images[:, 0, 0] == VICTIM).all(axis=1).any():
        raise ValueError("this image is beyond me")
    return fillable(images, prompts, metadata)


fillable_faulty.batch_invariant = True


def depends_on_batch(images, prompts, metadata):
    """Says that it does not."""
    return brightness(images, prompts, metadata) + len(images)


depends_on_batch.batch_invariant = True


def in_place(images, prompts, metadata):
    """Works on the memory of the images."""
    images //= 2
    return brightness(images, prompts, metadata)


in_place.batch_invariant = True


def unlocks(images, prompts, metadata):
    """The same, by force."""
    images.flags.writeable = True
    return in_place(images, prompts, metadata)


unlocks.batch_invariant = True


def jpeg(images, prompts, metadata):
    """Its monitor is named as another reward: jpeg_compressibility."""
    return {"jpeg": brightness(images, prompts, metadata), "compressibility": [1.0] * len(images)}


def ambiguous(images, prompts, metadata):
    """Two keys of one meaning."""
    return {"ambiguous": brightness(images, prompts, metadata), "a": [1.0] * len(images), "ambiguous_a": [2.0] * len(images)}


def hopeless(images, prompts, metadata):
    """Never has a score."""
    raise ValueError("no image is good enough")


def faulty_everywhere(images, prompts, metadata):
    """Never has a score either."""
    raise IndexError("lost")


def leaves(images, prompts, metadata):
    """Takes its process for its own."""
    sys.exit(0)


class Secret(Exception):
    """Cannot be unpickled."""

    def __init__(self, reason, number):
        super().__init__(reason)


def keeps_a_secret(images, prompts, metadata):
    """Raises what cannot travel."""
    raise Secret("the reason", 2)


def sick_on_one_actor(images, prompts, metadata, *, folder=""):
    """Brightness; in the process that scores images of 8 x 8 first, an error every time."""
    if images.shape[1:3] == (8, 8):
        sick = os.path.join(folder, "sick")
        try:
            os.symlink(str(os.getpid()), sick)
        except FileExistsError:
            pass
        if os.readlink(sick) == str(os.getpid()):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return brightness(images, prompts, metadata)


def slow_on_one_actor(images, prompts, metadata, *, folder=""):
    """Whoever comes first is slow for good."""
    slow = os.path.join(folder, "slow")
    try:
        os.close(os.open(slow, os.O_CREAT | os.O_EXCL))
        with open(slow, "w") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        pass
    with open(slow) as file:
        if file.read() == str(os.getpid()):
            time.sleep(6)
    return {"slow_on_one_actor": brightness(images, prompts, metadata), "pid": np.full(len(images), float(os.getpid()))}


def fingerprint(images, prompts, metadata):
    """A number that depends on every byte and its place."""
    return [float(zlib.crc32(image.tobytes())) for image in images]


def fingerprint_group(images, prompts, metadata):
    """The same for a whole group."""
    return fingerprint(images, prompts, metadata)


fingerprint_group.scope = "group"


def faulty(images, prompts, metadata, *, fault="raise"):
    """Brightness; on the marked image what `fault` says."""
    scores = brightness(images, prompts, metadata)
    hits = np.flatnonzero((images[:, 0, 0] == VICTIM).all(axis=1))
    if not len(hits):
        return scores
    if fault == "raise":
        raise ValueError("this image is beyond me")
    if fault == "hang":
        time.sleep(3600)
    if fault == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "nan":
        scores[hits[0]] = np.nan
    return {"short": scores[:-1], "empty": [], "words": ["good"] * len(images)}.get(fault, scores)


def faulty_group(images, prompts, metadata, group_ids, *, fault="raise"):
    """The same for a whole group."""
    return faulty(images, prompts, metadata, fault=fault)


faulty_group.scope = "group"


class Misspelt(Reward):
    """Means whole groups."""

    name = "misspelt"
    range = (0.0, 1.0)
    scope = "groups"

    def score(self, images, prompts, metadata, *, group_ids=None):
        """Brightness."""
        return {self.name: brightness(images, prompts, metadata)}


class Noting(Misspelt):
    """Has something to say of itself once it has scored."""

    name = "noting"
    scope = "sample"

    def score(self, images, prompts, metadata, *, group_ids=None):
        """Brightness."""
        self.notes = ("it does without colours",)
        return super().score(images, prompts, metadata)


class Unsure(Misspelt):
    """Takes for granted that a record names a colour."""

    name = "unsure"
    scope = "sample"

    @classmethod
    def check_prompt(cls, prompt, metadata, **options):
        """See `Reward.check_prompt`."""
        return None if metadata["colour"] else "no colour"


class Breaking(Misspelt):
    """Goes wrong before it has scored anything, where `where` says."""

    name = "breaking"
    scope = "sample"
    packages = ("lens",)
    options = {"where": Option("init", "which part of it")}

    def __init__(self, **options):
        super().__init__(**options)
        where = self.settings["where"]
        if where == "init":
            raise KeyError("weights")
        if where == "import":
            raise ModuleNotFoundError("no module named lens")
        if where == "chained":
            try:
                raise RewardError("the folder is empty")
            except RewardError as error:
                raise RewardError("option where is 'chained':\nit is a chain") from error

    @classmethod
    def conflicts(cls, settings):
        """See `Reward.conflicts`."""
        return [] if settings["where"] != "conflicts" else {}["no such"]

    def self_test(self):
        """See `Reward.self_test`."""
        if self.settings["where"] == "self_test":
            np.zeros(2).reshape(3)


def leaves_a_thread(images, prompts, metadata, *, path=""):
    """Starts a thread that never ends, and a note for the end of the process."""
    atexit.register(lambda: open(path, "w").write("ended"))
    threading.Thread(target=threading.Event().wait).start()
    return brightness(images, prompts, metadata)


def reads_a_target(images, prompts, metadata):
    """Wants metadata that the prompts of a test do not have."""
    return [len(extra["target"]) for extra in metadata]


def too_few(images, prompts, metadata):
    """Forgets an image."""
    return [0.5] * (len(images) - 1)


def declines(images, prompts, metadata):
    """Says of every image that it cannot be scored."""
    raise RewardError("there is no face in it")
