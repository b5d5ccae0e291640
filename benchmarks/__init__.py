"""Measurements of speed and checks on real hardware, each a module to be run from the repository's root.

    python -m benchmarks.sampler       sampling against the stock diffusers pipeline
    python -m benchmarks.learner       a training update against a bare PyTorch loop
    python -m benchmarks.whole_step    whole steps on real actors: step time, driver overhead, busy share of the cores
    python -m benchmarks.startup       from the command to the first image, phase by phase
    python -m benchmarks.baseline      the same steps in one plain loop in one process, phase by phase
    python -m benchmarks.gpu_check     models at their real size with random weights, without Ray and without a download

All but the last take a configuration file (default: the demo's); all take `section.key=value` overrides, and print JSON
with `--json`.
Two sides that are compared take turns in one process, so that a busy machine slows both alike.
"""

import os

for _key, _value in {
    "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error", "DIFFUSERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}.items():
    os.environ.setdefault(_key, _value)  # before those libraries are imported; their notes would get into the tables
