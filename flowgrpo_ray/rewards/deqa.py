"""deqa: image quality as DeQA-Score judges it (arXiv 2501.11561), on a reward server.

The model brings code and package versions of its own, so it runs in an environment of its own: a class of the contract in
base.py around it, served there by `flowgrpo-ray serve-reward my_module:DeqaReward`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from flowgrpo_ray.rewards.remote import RemoteReward, check_served, within


class DeqaReward(RemoteReward):
    """The score of a DeQA-Score server: a mean opinion score, 1 (bad) to 5 (excellent). The server's range lies inside
    that, whatever its name; a score outside is an error.

    Raises:
        RewardError: as `RewardClient`; or the server declares another range, so it serves another reward.
    """

    name: ClassVar[str] = "deqa"
    range: tuple[float, float] = (1.0, 5.0)
    licence: ClassVar[str] = "see zhiyuanyou/DeQA-Score-Mix3"
    description: ClassVar[str] = "Image quality, a mean opinion score of 1 to 5 (DeQA-Score on a reward server)"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        low, high = own = type(self).range
        check_served(self.name, self._client, None if within(self.range, own) else
                     f"a server of deqa declares a range inside {low:g} to {high:g} (the served class's `range`)")
