"""Flow-GRPO (arXiv 2505.05470) for flow-matching image models, as actors and learners on Ray.

This package holds the algorithm and imports no Ray; the Ray runtime is the `actors` package beside it.
"""

__version__ = "0.1.0"
