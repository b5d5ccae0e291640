"""What messages are made of."""

from __future__ import annotations

import pytest

from flowgrpo_ray.errors import ConfigError, FlowGrpoError, Problems, counted


@pytest.mark.parametrize(("number", "noun", "text"), [
    (1, "step", "1 step"), (0, "step", "0 steps"), (2, "image", "2 images"), (3, "retry", "3 retries"),
    (1, "retry", "1 retry")])
def test_a_number_and_its_noun(number, noun, text):
    assert counted(number, noun) == text


def test_problems_are_raised_together_and_other_errors_at_once():
    problems = Problems()
    problems.raise_found()
    for text in ("a is wrong", "b is wrong", "a is wrong"):
        with problems.collected():
            raise ConfigError(text)
    with pytest.raises(ConfigError, match="^a is wrong\nb is wrong$"):
        problems.raise_found()
    with pytest.raises(FlowGrpoError, match="unreachable"), problems.collected():
        raise FlowGrpoError("unreachable")
