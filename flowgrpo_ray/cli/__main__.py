"""`python -m flowgrpo_ray.cli` is the command `flowgrpo-ray`."""

from flowgrpo_ray.cli.main import main

main()
