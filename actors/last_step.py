"""The last finished step, and its checkpoint when a signal ends the run in the middle of the next one.

The learner changes its state in place. When a step begins and the one before it is in no checkpoint, rank 0 keeps a copy of
the state (`Learner.begin_step`), so that a signal at any time, between two updates too, can write the finished step: a resume
from there is one from between two steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ray

from actors import head
from actors.learner import LearnerGroup
from flowgrpo_ray import signals, storage
from flowgrpo_ray.errors import FlowGrpoError, described
from flowgrpo_ray.run_dir.checkpoint import TOKEN, CheckpointInfo, FileEntry
from flowgrpo_ray.run_dir.metrics import Row
from flowgrpo_ray.run_dir.recorder import Recorder


@dataclass(frozen=True)
class Saved:
    """A checkpoint of this run: its step, URI, bytes, and when it was committed (seconds since the epoch)."""

    step: int
    uri: str
    nbytes: int
    time: float | None


class LastStep:
    """Steps finished (their rows are recorded) and steps saved (in a checkpoint).

    Args:
        start: the step that the run starts after, which nothing is lost of.
        grace_s: seconds that a checkpoint may take after a signal; 0: none is written.
        resumed_from: the checkpoint of the step `start`, if there is one.

    Attributes:
        checkpoint: the newest one.
    """

    def __init__(self, start: int, grace_s: float, resumed_from: CheckpointInfo | None = None) -> None:
        self.finished = self.saved = start
        self.checkpoint = None if resumed_from is None else Saved(
            start, resumed_from.uri, _nbytes(resumed_from.files), storage.modified(storage.join(resumed_from.uri, TOKEN)))
        self._grace, self._begun = grace_s, False
        self._totals: Row = {}
        head.last_words = ""

    def begin(self) -> bool:
        """The next step begins; returns whether the learner has to keep the state of the last one."""
        self._begun = True
        return self._grace > 0 and self.finished > self.saved

    def finish(self, step: int, totals: Row) -> None:
        """A step is recorded; `totals` are the run's so far."""
        self.finished, self._totals, self._begun = step, totals, False
        head.last_words = self.lost()

    def save(self, learners: LearnerGroup, recorder: Recorder, timeout_s: float | None = None) -> None:
        """Write and commit the checkpoint of the last finished step, which the learners' state is that of."""
        entries = learners.call("save", recorder.checkpoint_uri(self.finished), timeout_s=timeout_s)[0]
        self._commit(recorder, entries)

    def _commit(self, recorder: Recorder, entries: list[FileEntry]) -> None:
        recorder.commit(self.finished, entries, self._totals)
        self.saved = self.finished
        self.checkpoint = Saved(self.saved, recorder.checkpoint_uri(self.saved), _nbytes(entries), time.time())
        head.last_words = ""

    def lost(self) -> str:
        """What would be lost if the run ended now, as in "step 5 is lost"; empty if nothing."""
        if self.finished <= self.saved:
            return ""
        first = self.saved + 1
        which = f"step {first} is" if first == self.finished else f"steps {first} to {self.finished} are"
        return f"{which} lost"

    def save_after_signal(self, learners: LearnerGroup, recorder: Recorder, say: Callable[[str], None]) -> None:
        """Write the checkpoint of the last finished step within the grace, or say which steps are lost.

        Raises:
            KeyboardInterrupt, signals.Terminated: another signal came meanwhile.
        """
        if not self.lost():
            return
        if self._grace == 0 or head.gone():
            say(f"no checkpoint is written: {self.lost()}")
            return
        say(f"ending: writing the checkpoint of step {self.finished}, for up to {self._grace:g} s (run.grace_s); a second "
            "signal ends at once")
        started = time.monotonic()
        try:
            with signals.finishing():
                if self._begun:
                    uri = recorder.checkpoint_uri(self.finished)
                    self._commit(recorder, learners.save_finished(uri, self.finished, self._grace))
                else:
                    self.save(learners, recorder, self._grace)
        except (FlowGrpoError, OSError, ray.exceptions.RayError) as error:
            say(f"no checkpoint of step {self.finished} was written ({described(error)}): {self.lost()}")
        except BaseException:
            say(f"no checkpoint is written: {self.lost()}")
            raise
        else:
            seconds = time.monotonic() - started
            say(f"wrote the checkpoint of step {self.saved} in {seconds:.1f} s; the same command resumes from it")


def _nbytes(files: Sequence[FileEntry]) -> int:
    return sum(file.size for file in files)
