"""All that depends on the kind of device: choosing it, process settings, memory, timing."""

from __future__ import annotations

import os
import time

import torch


def configure_process(*, on_gpu: bool, cpu_threads: int) -> torch.device:
    """Settings of an actor process; returns its device (cuda:0 of the GPUs it was given, else the CPU).

    On CUDA, float32 matrix products (the LoRA layers on a half-precision base) may use TF32, in sampler and learner alike.
    On CPU the thread count is fixed: bits depend on it, and two torch threads on two busy cores are 10-20 times slower.
    """
    if on_gpu:
        if not torch.cuda.is_available():
            raise RuntimeError("this actor was given a GPU, but torch sees none: is this a CPU build of torch?")
        torch.set_float32_matmul_precision("high")
        return torch.device("cuda", 0)
    torch.set_num_threads(cpu_threads)
    torch.set_flush_denormal(True)
    return torch.device("cpu")


def lower_priority(nice: int) -> None:
    """Raise the process's niceness to `nice`, so that on a shared machine the others' work goes first."""
    if nice > 0:
        os.nice(max(0, nice - os.nice(0)))


def backend_of(device: torch.device) -> str:
    """torch.distributed backend."""
    return "nccl" if device.type == "cuda" else "gloo"


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory_bytes(device: torch.device) -> int:
    """Largest GPU memory allocated by this process since the last reset; 0 on CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def reset_peak_memory(device: torch.device) -> None:
    """Let `peak_memory_bytes` begin again with what is allocated now; nothing to do on CPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def free_memory_bytes(device: torch.device) -> int | None:
    """Free GPU memory; None on CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


class Stopwatch:
    """Wall and CPU seconds of a block; waits for the device at the end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds = self.cpu_seconds = 0.0

    def __enter__(self) -> Stopwatch:
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *exc: object) -> None:
        synchronize(self._device)
        self.seconds = time.perf_counter() - self._wall
        self.cpu_seconds = time.process_time() - self._cpu
