"""The model classes of the package image-reward 1.5, imported where much of what it asks for is absent.

The package pins timm 0.6.13 (which brings torchvision), uses `clip` without naming it, and names of transformers that are
gone from version 5. Its reward model needs hardly any of that. So the modules of the model are imported without the
package's `__init__`, and what they ask for and cannot have is stood in for while they are imported; in an environment with
the pinned versions nothing is.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from flowgrpo_ray.rewards.base import RewardError

log = logging.getLogger(__name__)

INSTALL = "pip install --no-deps image-reward==1.5"
ALIAS = "_flowgrpo_image_reward"  # so that the real package can be imported beside it

# Module -> names that the model's modules import from it. Of these only PatchEmbed, DropPath, trunc_normal_ and the five
# of torchvision are ever called when a model is built.
_WANTED: dict[str, dict[str, tuple[str, ...]]] = {
    "torchvision": {"transforms": ("Compose", "Resize", "CenterCrop", "ToTensor", "Normalize")},
    "timm": {
        "models.hub": ("download_cached_file",),
        "models.vision_transformer": ("_cfg", "PatchEmbed"),
        "models.registry": ("register_model",),
        "models.layers": ("trunc_normal_", "DropPath"),
        "models.helpers": ("named_apply", "adapt_input_conv"),
    },
    "fairscale": {"nn.checkpoint.checkpoint_activations": ("checkpoint_wrapper",)},
}
_TRANSFORMERS = ("apply_chunking_to_forward", "find_pruneable_heads_and_indices", "prune_linear_layer")


def load(preprocess: Callable[[Any], Any]) -> tuple[Any, Any]:
    """The package's modules `ImageReward` (class ImageReward) and `models.BLIP.blip_pretrain` (its parts).

    Args:
        preprocess: the preprocessing (PIL image -> tensor [3, 224, 224]) of models that are made without torchvision.

    Raises:
        RewardError: the package is not installed, or has other modules than version 1.5.
    """
    names = f"{ALIAS}.ImageReward", f"{ALIAS}.models.BLIP.blip_pretrain"
    if not all(name in sys.modules for name in names):
        spec = importlib.util.find_spec("ImageReward")  # does not run its __init__
        if spec is None or not spec.submodule_search_locations:
            raise RewardError(f"reward image_reward needs the package image-reward: {INSTALL}")
        folder = spec.submodule_search_locations[0]
        for name, part in ((ALIAS, ""), (f"{ALIAS}.models", "models")):
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__path__ = [os.path.join(folder, part)]
        try:
            with _quiet(), _stand_ins(preprocess):
                for name in names:
                    importlib.import_module(name)
        except Exception as error:
            for name in [name for name in sys.modules if name.partition(".")[0] == ALIAS]:
                del sys.modules[name]
            raise RewardError(f"reward image_reward: the package image-reward in {folder} cannot be imported "
                              f"({type(error).__name__}: {error}); version 1.5 can: {INSTALL}") from error
        _complete(sys.modules[f"{ALIAS}.models.BLIP.med"].BertModel)
    return sys.modules[names[0]], sys.modules[names[1]]


@contextmanager
def _quiet() -> Iterator[None]:
    """The package turns warnings and the log of transformers off, for all of the process, when it is imported."""
    import transformers

    verbosity = transformers.logging.get_verbosity()
    with warnings.catch_warnings():
        yield
    transformers.logging.set_verbosity(verbosity)


@contextmanager
def _stand_ins(preprocess: Callable[[Any], Any]) -> Iterator[None]:
    """What is missing, put in place for the time of an import."""
    from transformers import modeling_utils, pytorch_utils

    given = _given(preprocess)
    before: dict[str, ModuleType] = {}
    added: list[str] = []
    lacking = [name for name in _TRANSFORMERS if not hasattr(modeling_utils, name)]
    try:
        # All are tried before the first is stood in for: timm imports torchvision.
        unusable = {package: why for package, modules in _WANTED.items() if (why := _unusable(package, modules))}
        for package, why in unusable.items():
            log.info("image_reward does without %s (%s)", package, why)
            kept = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == package}
            before |= kept
            for name in kept:
                del sys.modules[name]
            for path, wanted in _WANTED[package].items():
                module = _make(f"{package}.{path}", added)
                for name in wanted:
                    setattr(module, name, given.get(name) or _uncalled(f"{package}.{path}.{name}"))
        for name in lacking:
            setattr(modeling_utils, name, getattr(pytorch_utils, name, None) or _uncalled(f"transformers' {name}"))
        yield
    finally:
        for name in added:
            del sys.modules[name]
        sys.modules.update(before)
        for name in lacking:
            delattr(modeling_utils, name)


def _unusable(package: str, modules: dict[str, tuple[str, ...]]) -> str | None:
    """Why the names that are wanted of a package cannot be had, or None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for path, names in modules.items():
                module = importlib.import_module(f"{package}.{path}")
                for name in names:
                    getattr(module, name)
    except Exception as error:  # a torchvision of another torch raises what it likes
        return f"{type(error).__name__}: {error}"
    return None


def _make(name: str, added: list[str]) -> ModuleType:
    """An empty module, and the packages above it."""
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        path = ".".join(parts[:length])
        if path not in sys.modules:
            sys.modules[path] = ModuleType(path)
            sys.modules[path].__path__ = []
            added.append(path)
    return sys.modules[name]


def _given(preprocess: Callable[[Any], Any]) -> dict[str, Any]:
    """Stand-ins for what is called."""
    import torch

    class PatchEmbed(torch.nn.Module):
        """[n, 3, H, W] -> [n, patches, embed_dim]: a linear map of every patch."""

        def __init__(self, img_size: int, patch_size: int, in_chans: int, embed_dim: int) -> None:
            super().__init__()
            self.num_patches = (img_size // patch_size) ** 2
            self.proj = torch.nn.Conv2d(in_chans, embed_dim, patch_size, patch_size)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.proj(x).flatten(2).transpose(1, 2)

    class DropPath(torch.nn.Module):
        """Leaves out residual branches at random in training; scoring is none."""

        def __init__(self, drop_prob: float) -> None:
            super().__init__()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                raise RewardError("reward image_reward scores; it is not made for training its model")
            return x

    steps = dict.fromkeys(("Resize", "CenterCrop", "ToTensor", "Normalize"), lambda *args, **kwargs: None)
    return {"PatchEmbed": PatchEmbed, "DropPath": DropPath, "trunc_normal_": torch.nn.init.trunc_normal_,
            "Compose": lambda parts: preprocess, **steps}


def _uncalled(name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise RewardError(f"reward image_reward: {name} is called, and only stood in for")
    return call


def _complete(bert: type) -> None:
    """What transformers 5 has no more or asks for, as far as the package's text encoder comes across it."""
    import torch

    def get_head_mask(self: Any, head_mask: None, layers: int) -> list[None]:
        return [None] * layers

    def invert_attention_mask(self: Any, mask: torch.Tensor) -> torch.Tensor:
        """1 (attend) -> 0, 0 -> the lowest number, [n, keys] -> [n, 1, 1, keys], to be added to the scores."""
        return (1.0 - mask[:, None, None, :].to(self.dtype)) * torch.finfo(self.dtype).min

    # The keys are asked for by an init_weights that is not called through transformers' post_init; no weights are tied.
    for name, value in (("get_head_mask", get_head_mask), ("invert_attention_mask", invert_attention_mask),
                        ("all_tied_weights_keys", {})):
        if not hasattr(bert, name):
            setattr(bert, name, value)
