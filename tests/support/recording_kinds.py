"""Every kind of reward that looks at images itself: `recording_kinds:KIND` is the built-in class, which writes what
reaches its network, reader or encoder into a folder, one .npy per image in the order they come."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import numpy as np
from faulty_kinds import Faulty, networks

from flowgrpo_ray.errors import ConfigError
from flowgrpo_ray.rewards import Option, reward_class


def recorded(folder: str, what: str) -> list[np.ndarray]:
    return [np.load(os.path.join(folder, name)) for name in sorted(os.listdir(folder)) if name.startswith(f"{what}-")]


class Recording(Faulty):
    """Before a reward class."""

    def __init__(self, folder: str, **options: Any) -> None:
        super().__init__(**options)
        self._folder = folder
        for network, what in zip(networks(self), ("network", "second"), strict=False):
            network.register_forward_pre_hook(
                lambda network, args, kwargs, what=what: self._keep(what, (args or [kwargs["pixel_values"]])[0].numpy()),
                with_kwargs=True)
        if hasattr(self, "read"):
            predict = self._model.predict
            self._model.predict = lambda images, **more: (self._keep("reader", images), predict(images, **more))[1]
        if hasattr(self, "_sign"):
            self._keep_files()

    def _keep_files(self) -> None:
        """What a decoder makes of each JPEG that is written."""
        from PIL import Image

        save = Image.Image.save

        def kept(image: Any, file: Any, *args: Any, **more: Any) -> None:
            save(image, file, *args, **more)
            file.seek(0)
            assert more["format"] == "JPEG"
            self._keep("file", [np.asarray(Image.open(file))])
            file.seek(0, os.SEEK_END)

        Image.Image.save = kept

    def _keep(self, what: str, images: Any) -> None:
        for image in images:
            np.save(os.path.join(self._folder, f"{what}-{len(os.listdir(self._folder)):04}.npy"), image)


@lru_cache
def _of_kind(kind: str) -> type:
    base = reward_class(kind)
    return type(f"Recording_{kind}", (Recording, base), {"options": {**base.options, "folder": Option(None, "where to")}})


def __getattr__(kind: str) -> type:
    try:
        return _of_kind(kind)
    except ConfigError:
        raise AttributeError(kind) from None
