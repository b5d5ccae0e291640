"""Proof of a weight sync: what every actor has to answer before it may sample."""

from __future__ import annotations

from dataclasses import dataclass

import ray

from flowgrpo_ray.data.trajectory import ExportInfo, SyncReply
from flowgrpo_ray.errors import SyncError, counted


@dataclass(frozen=True)
class Published:
    """A version that the learner has exported. `changed` = tensors that differ from the version before (-1: unknown)."""

    slot: str
    version: int
    digest: str
    tensors: int
    changed: int
    arrays: ray.ObjectRef | None


def verify(reply: SyncReply, published: Published) -> None:
    """Compare an actor's answer with the export.

    Raises:
        SyncError: another version, not all tensors bound, another digest, or not as many tensors changed as the learner
            changed.
    """
    where = f"weight sync of {published.slot} version {published.version}"
    if (reply.slot, reply.version) != (published.slot, published.version):
        raise SyncError(f"{where}: an actor answered for {reply.slot} version {reply.version}")
    if reply.bound != published.tensors:
        raise SyncError(f"{where}: an actor bound {counted(reply.bound, 'tensor')} of {published.tensors}")
    if reply.digest != published.digest:
        raise SyncError(f"{where}: an actor's parameters read back as {reply.digest[:16]}, the learner exported "
                        f"{published.digest[:16]}")
    expected = {published.version: 0, published.version - 1: published.changed}.get(reply.previous, -1)
    if expected >= 0 and reply.changed != expected:
        raise SyncError(f"{where}: {counted(reply.changed, 'tensor')} changed in an actor, {expected} in the learner")


def agreed(infos: list[ExportInfo]) -> ExportInfo:
    """The export that all ranks agree on.

    Raises:
        SyncError: ranks hold different adapters.
    """
    for rank, info in enumerate(infos):
        if (info.version, info.digest, info.ema_digest) != (infos[0].version, infos[0].digest, infos[0].ema_digest):
            raise SyncError(f"learner rank {rank} holds another adapter than rank 0 at version {info.version}: "
                            f"{info.digest[:16]} against {infos[0].digest[:16]}")
    return infos[0]
