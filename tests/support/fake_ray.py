"""Ray as far as a pool of actors uses it, in one thread: a test says which call ends next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayTaskError

from actors import lifecycle, nodes, pool


class Ref:
    """What a call will return; `end` sets it."""

    def __init__(self) -> None:
        self.value: Any = None
        self.error: Exception | None = None
        self.ended = False

    def end(self, value: Any = None, error: Exception | None = None) -> None:
        self.value, self.error, self.ended = value, error, True


class Call:
    """A call that an actor has been given."""

    def __init__(self, handle: Handle, method: str, args: tuple, refs: list[Ref]) -> None:
        self.handle, self.method, self.args, self.refs = handle, method, args, refs

    def end(self) -> None:
        """Answer as the actor does."""
        try:
            value = self.handle.does(self.method, *self.args)
        except Exception as error:
            self.refs[0].end(error=RayTaskError(self.method, repr(error), error))
        else:
            self.refs[0].end(value)
        for ref in self.refs[1:]:
            ref.end(None)


class _Method:
    def __init__(self, handle: Handle, name: str) -> None:
        self._handle, self._name, self._returns = handle, name, 1

    def options(self, num_returns: int = 1) -> _Method:
        self._returns = num_returns
        return self

    def remote(self, *args: Any) -> Any:
        refs = [Ref() for _ in range(self._returns)]
        self._handle.calls.append(Call(self._handle, self._name, args, refs))
        return refs if self._returns > 1 else refs[0]


class Handle:
    """An actor; `does(method, *args)` is what it does. Its calls run one after another."""

    def __init__(self, does: Callable[..., Any]) -> None:
        self.does, self.calls, self.killed = does, [], False

    def __getattr__(self, name: str) -> _Method:
        return _Method(self, name)


class FakeRay:
    """Stands in the place of the module `ray` in what a pool is made of (`install`)."""

    ObjectRef = Ref

    @staticmethod
    def get(ref: Ref, timeout: float | None = None) -> Any:
        assert ref.ended, "a pool must not wait for a call"
        if ref.error is not None:
            raise ref.error
        return ref.value

    @staticmethod
    def wait(
        refs: list[Ref], num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Ref], list[Ref]]:
        return [ref for ref in refs if ref.ended], [ref for ref in refs if not ref.ended]

    @staticmethod
    def kill(handle: Handle) -> None:
        handle.killed = True
        for call in handle.calls:
            if not call.refs[0].ended:
                call.refs[0].end(error=RayActorError(error_msg="killed"))
        handle.calls.clear()

    @staticmethod
    def available_resources() -> dict[str, float]:
        return {}

    cluster_resources = available_resources


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (lifecycle, pool):
        monkeypatch.setattr(module, "ray", FakeRay)
    monkeypatch.setattr(nodes, "_ended", lambda *_: "")  # nodes live
