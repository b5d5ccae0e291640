import pytest
import torch

from flowgrpo_ray.learning.ema import Ema


def test_warm_up_by_hand():
    """d = 0.1, 2/11, 3/12, ... at updates 0, 1, 2, ..."""
    theta = torch.tensor([0.0])
    ema = Ema({"w": theta}, decay=0.9, every_updates=1)
    for s, (value, shadow) in enumerate([(1.0, 0.9), (2.0, 1.8), (-3.0, -1.8), (5.0, (4 * -1.8 + 9 * 5.0) / 13)]):
        theta.fill_(value)
        assert ema.update(s)
        assert float(ema.shadow["w"]) == pytest.approx(shadow, rel=1e-6)


def test_decay_grows_to_its_limit():
    ema = Ema({}, decay=0.9)
    assert [round(ema.decay_at(s), 4) for s in (0, 7, 15, 79, 80, 100_000)] == [0.1, 0.4706, 0.64, 0.8989, 0.9, 0.9]
    assert Ema({}, decay=0.3).decay_at(50) == 0.3


def test_moves_at_every_eighth_update_only():
    theta = torch.zeros(2)
    ema = Ema({"w": theta}, decay=0.9, every_updates=8)
    theta.fill_(1.0)
    assert [s for s in range(24) if ema.update(s)] == [7, 15, 23]
    expected = 1 - (8 / 17) * (16 / 25) * (24 / 33)
    assert ema.shadow["w"].tolist() == pytest.approx([expected] * 2)


def test_state_is_float32_and_a_copy():
    theta = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    ema = Ema({"w": theta}, decay=0.9, every_updates=1)
    assert ema.shadow["w"].dtype == torch.float32 and not ema.shadow["w"].requires_grad
    state = ema.state_dict()
    with torch.no_grad():
        theta.fill_(3.0)
    assert ema.shadow["w"].tolist() == [1.0] * 3
    ema.update(0)
    assert state["w"].tolist() == [1.0] * 3 and ema.shadow["w"].tolist() == pytest.approx([2.8] * 3)


def test_a_resumed_average_goes_on_bit_for_bit():
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(5, generator=generator) for _ in range(12)]

    def run(ema, theta, start, stop):
        for s in range(start, stop):
            theta.copy_(weights[s])
            ema.update(s)

    theta = torch.zeros(5)
    through = Ema({"w": theta}, every_updates=2)
    run(through, theta, 0, 12)
    theta = torch.zeros(5)
    first = Ema({"w": theta}, every_updates=2)
    run(first, theta, 0, 7)
    second = Ema({"w": theta}, every_updates=2)
    second.load_state_dict(first.state_dict())
    run(second, theta, 7, 12)
    assert torch.equal(second.shadow["w"], through.shadow["w"])


def test_a_foreign_state_is_refused():
    ema = Ema({"a": torch.zeros(2), "b": torch.zeros(2)})
    with pytest.raises(ValueError, match="b is on one side only"):
        ema.load_state_dict({"a": torch.zeros(2)})
    with pytest.raises(ValueError, match="shape"):
        ema.load_state_dict({"a": torch.zeros(2), "b": torch.zeros(1)})  # would broadcast
    with pytest.raises(ValueError, match="decay 1"):
        Ema({}, decay=1.0)
