"""Versions that images and manifests agree on."""

RAY_VERSION = "2.60.0"  # of the images' lock file and of `rayVersion` in the manifests: a job must match its cluster
