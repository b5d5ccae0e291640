"""The wire format: bits there and back, arrays of your own, and the sizes of real models."""

import pickle

import numpy as np
import pytest
import torch

from flowgrpo_ray.data.trajectory import SampleRequest, Trajectory, from_wire, to_wire


def request(m: int, window: tuple[int, int]) -> SampleRequest:
    return SampleRequest(
        run_id="r", slot="policy", version=3, noise_keys=tuple((42, 3, 0, i) for i in range(m)), stream="train",
        index=(0,) * m, height=512, width=512, num_steps=10, guidance_scale=4.5, window=window)


def trajectory(m: int, window: tuple[int, int], shape: tuple[int, ...], num_steps: int = 10) -> Trajectory:
    return Trajectory(
        latents=np.zeros((window[1] + 1, m, *shape), np.float32), log_probs=np.zeros((m, window[1]), np.float32),
        sigmas=np.zeros(num_steps + 1, np.float32), window=window, request=request(m, window), digest="d")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_tensors_come_back_bit_for_bit(dtype):
    tensor = (torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0)) * 100).to(dtype)
    wire = to_wire(tensor)
    assert wire.flags["C_CONTIGUOUS"] and wire.dtype == {torch.bfloat16: np.uint16}.get(dtype, wire.dtype)
    assert wire.nbytes == tensor.nbytes
    back = from_wire(wire)
    assert back.dtype == dtype and back.device.type == "cpu" and torch.equal(back, tensor)


def test_special_bfloat16_bits_survive():
    tensor = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 3e38, 1e-40]).to(torch.bfloat16)
    assert torch.equal(from_wire(to_wire(tensor)).view(torch.int16), tensor.view(torch.int16))


def test_strided_and_empty_tensors():
    tensor = torch.arange(24.0).reshape(2, 3, 4).transpose(0, 2)[:, ::2]
    wire = to_wire(tensor)
    assert wire.flags["C_CONTIGUOUS"] and np.array_equal(wire, tensor.numpy())
    assert from_wire(to_wire(torch.zeros(0, 5))).shape == (0, 5)


def test_a_tensor_off_the_wire_is_its_own():
    """A view would pin the whole object in the store, whose arrays are read-only besides."""
    wire = np.arange(6, dtype=np.float32).reshape(2, 3)
    wire.setflags(write=False)
    tensor = from_wire(wire)
    tensor += 1
    assert wire[0, 0] == 0 and not np.shares_memory(wire, tensor.numpy())
    assert from_wire(np.arange(12, dtype=np.float32).reshape(3, 4).T).is_contiguous()


def test_tensors_with_a_graph_are_taken():
    parameter = torch.ones(2, requires_grad=True)
    assert to_wire(parameter * 2).tolist() == [2.0, 2.0]


def test_a_sample_of_sd35_at_512_pixels_is_a_megabyte():
    """Latents 16 x 64 x 64, a window of 3 steps: 1.05 MB a sample."""
    one = trajectory(8, (2, 3), (16, 64, 64))
    assert one.nbytes == 8 * (4 * 16 * 64 * 64 * 4 + 3 * 4) + 11 * 4
    assert one.nbytes / 8 == pytest.approx(1.05e6, rel=2e-3)
    assert len(pickle.dumps(one, protocol=5)) < one.nbytes + 4096  # nothing else of size travels along


def test_a_trajectory_of_an_evaluation_is_next_to_nothing():
    assert trajectory(8, (0, 0), ()).nbytes < 100


def test_requests_are_values():
    one = request(4, (1, 2))
    assert one.size == 4 and one == request(4, (1, 2)) and hash(one) == hash(pickle.loads(pickle.dumps(one)))
    with pytest.raises(AttributeError):
        one.version = 4
