"""The record of passed checks in the user's cache: later starts with the same weights on the same GPU need not compare again."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from nanovllm import models, ops
from nanovllm.files import cache_folder, write_whole
from nanovllm.models.fast.cuts import Cuts
from nanovllm.models.model import Model
from nanovllm.types import Tensor

FOLDER = "checked"  # in the user's cache
WORDS = 1 << 22  # 64-bit words of a tensor that are read at once
LOW = 0xFFFFFFFF  # the lower half of a word
MULTIPLIER = 0x1E3779B97F4A7C15  # any large odd number


def passed(model: Model, page_size: int, cuts: Cuts | None) -> bool:
    """Whether all fast layers of this model, and its head, passed `choose` before, by the record of `note_passed`.

    Args:
        model: The model. Its weights are read once.
        page_size: Tokens per page.
        cuts: The tile configurations of the kernels; None for the defaults.
    """
    try:
        return _path(model, page_size, cuts).exists()
    except OSError:
        return False


def note_passed(model: Model, page_size: int, cuts: Cuts | None) -> None:
    """Record that all fast layers and the head passed `choose`. Without a cache that can be written, nothing is recorded."""
    with suppress(OSError):
        path = _path(model, page_size, cuts)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_whole(path, f"{model.name}\n".encode(), mode=0o644)


def weights_digest(params: Any) -> str:
    """A hash (hex) of the shapes, dtypes and bytes of all tensors of a pytree, computed on their device.

    It finds weights that changed by accident. It is no protection against somebody who makes others with the same hash.
    """
    leaves = [leaf for leaf in pytree.tree_leaves(params) if isinstance(leaf, Tensor)]
    sums = [each for leaf in leaves if leaf.numel() for each in _sums(leaf)]
    hashed = hashlib.sha256(repr([(tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves]).encode())
    hashed.update(json.dumps(torch.stack(sums).tolist() if sums else []).encode())
    return hashed.hexdigest()


def _sums(leaf: Tensor) -> Iterator[Tensor]:
    """For each piece of a tensor, the sum of its words modulo 2 ** 64, each multiplied by an odd number for its place and mixed.

    Without the mixing, two words whose highest bits change would leave the sum as it is: odd numbers move no highest bit.
    """
    data = leaf.detach().contiguous().flatten().view(torch.uint8)
    data = torch.nn.functional.pad(data, (0, -len(data) % 8)) if len(data) % 8 or data.storage_offset() % 8 else data
    for words in data.view(torch.int64).split(WORDS):
        places = torch.arange(1, 2 * len(words), 2, dtype=torch.int64, device=leaf.device)
        mixed = words * (places * MULTIPLIER)
        yield ((mixed ^ ((mixed >> 32) & LOW)) * MULTIPLIER).sum()


def _path(model: Model, page_size: int, cuts: Cuts | None) -> Path:
    """The file that records a passed check. Its name is a hash of all that decides how the check ends."""
    gpu = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type
    versions = [(name, _version(name)) for name in ("torch", "triton")]
    steps = None if cuts is None else sorted(cuts.steps.items())
    key = hashlib.sha256(repr((gpu, versions, model.config, model.dtype, page_size, steps, weights_digest(model.params))).encode())
    for package in (models, ops):
        assert package.__file__ is not None
        for source in sorted(Path(package.__file__).parent.rglob("*.py")):
            key.update(source.read_bytes())
    return cache_folder() / FOLDER / key.hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
