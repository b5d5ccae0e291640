"""Names of a run's actors: what Ray's dashboard lists, and what another run finds it by.

Actors of a run live in a namespace of this start of its driver alone, so that neither another run of the same name nor an
earlier driver of this one, living or dying, has a name that is wanted here.
"""

from __future__ import annotations

from collections import Counter

PREFIX = "flowgrpo-"  # begins the namespace of every run's actors; that of the control actors is another


class ActorNames:
    """Hands out names: `<run>/rollout-3`, and `<run>/rollout-3.1` for the first actor that replaces it.

    Args:
        run: `run.name`.
        start_id: names this start of the run's driver.
    """

    def __init__(self, run: str, start_id: str) -> None:
        self.run, self.namespace = run, f"{PREFIX}{run}-{start_id}"
        self._made: Counter[tuple[str, int]] = Counter()

    def new(self, pool: str, index: int) -> str:
        """The name of one more actor in that place of a pool."""
        attempt = self._made[pool, index]
        self._made[pool, index] += 1
        return f"{self.run}/{pool}-{index}" + (f".{attempt}" if attempt else "")
