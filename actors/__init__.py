"""The Ray runtime of flowgrpo_ray: rollout, reward and learner actors, their pools, and the controller."""
