"""A reward whose install is broken: its scores have the wrong sign."""

from flowgrpo_ray.rewards.jpeg import JpegCompressibility


class UpsideDown(JpegCompressibility):
    name = "upside_down"
    _sign = 1
    range = (0.0, float("inf"))

    def self_test_case(self):
        return JpegCompressibility.self_test_case(JpegCompressibility())

    def score(self, images, prompts, metadata, *, group_ids=None):
        return {"upside_down": super().score(images, prompts, metadata)["upside_down"]}
