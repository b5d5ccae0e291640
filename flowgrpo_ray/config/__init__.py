"""The configuration: `load` reads it, `Config` is its tree."""

from flowgrpo_ray.config.load import Config, load

__all__ = ["Config", "load"]
