import torch
from diffusers.utils.torch_utils import randn_tensor

from flowgrpo_ray.data.plan import noise_seed
from flowgrpo_ray.sampling.noise import draw

SEEDS = [noise_seed(42, 3, 1, sample, "train", -1) for sample in range(6)]


def test_a_sample_does_not_depend_on_its_batch():
    together = draw(SEEDS, (4, 8, 8))
    assert together.shape == (6, 4, 8, 8) and together.dtype == torch.float32 and together.device.type == "cpu"
    for place, seed in enumerate(SEEDS):
        assert torch.equal(draw([seed], (4, 8, 8))[0], together[place])
    assert torch.equal(draw(SEEDS[::-1], (4, 8, 8)).flip(0), together)


def test_drawing_neither_reads_nor_moves_the_global_generator():
    torch.manual_seed(0)
    first = draw(SEEDS, (3, 5))
    expected = torch.rand(3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.rand(3), expected)
    torch.manual_seed(1)
    assert torch.equal(draw(SEEDS, (3, 5)), first)


def test_the_default_dtype_does_not_change_the_noise():
    expected = draw(SEEDS, (2, 3))
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(draw(SEEDS, (2, 3)), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_samples_are_independent_standard_normal():
    noise = draw(SEEDS[:4], (4096,))
    assert noise.mean(1).abs().max() < 5 / 64
    assert (noise.std(1) - 1).abs().max() < 0.06
    assert (torch.corrcoef(noise) - torch.eye(4)).abs().max() < 5 / 64


def test_a_stock_pipeline_draws_the_same_noise_from_the_same_seeds():
    """So an evaluation image can be made again with diffusers alone: pass it one generator per sample."""
    generators = [torch.Generator().manual_seed(seed) for seed in SEEDS]
    stock = randn_tensor((6, 4, 8, 8), generator=generators, device=torch.device("cpu"), dtype=torch.float32)
    assert torch.equal(draw(SEEDS, (4, 8, 8)), stock)
