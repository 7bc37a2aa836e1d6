"""`FusedDecodePlan`: how the fused decode attention splits its rows."""

from collections.abc import Sequence

import numpy as np
import torch

from nanovllm.ops.attention.plan_table import register
from nanovllm.ops.backends import LARGEST, shared_memory
from nanovllm.ops.cuts import CutError, powers_of_two
from nanovllm.types import Int32

MOST_TOKENS, MOST_TILES = 1 << 14, 16  # of a batch of few rows; of one program over them
PIPELINED = 16  # rows beyond which there are programs enough to keep many tiles in flight
MANY = (  # rows, up to: as many programs as a GPU's multiprocessors finish together, whose number goes up and down with the rows
    (48, (64, 4, 3, 1)), (64, (32, 2, 4, 1)), (96, (64, 4, 3, 1)), (128, (32, 2, 4, 1)), (160, (64, 4, 2, 1)), (192, (32, 2, 3, 1)),
    (224, (64, 4, 2, 1)), (0, (32, 2, 4, 1)),
)  # fmt: skip
WIDE = 128  # channels of a head beyond which a tile's keys and values, and the next one's, ask for the registers of 8 warps
LONG = 1024  # tokens of a row of such a batch that do not hold the others up


def cut_of(batch_size: int, head_dim: int, memory: int) -> tuple[int, int, int, int]:
    """Tokens of a tile, warps, tiles in flight (0: one, in registers) and splits, a power of two: the fastest on an H200 of those tried.

    Tiles in flight take `memory` bytes of shared memory at most.
    """
    if batch_size > PIPELINED:
        best = next(cut for rows, cut in MANY if batch_size <= rows or not rows)
        token = 4 << (head_dim - 1).bit_length()  # bytes of its key and value
        return next(cut for cut in (best, (32, 2, 3, 1), (32, 2, 2, 1), (16, 2, 2, 1)) if cut[0] * cut[2] * token <= memory)
    warps, splits = next(cut for rows, cut in ((2, (4, 32)), (4, (8, 4)), (8, (8, 2)), (PIPELINED, (4, 2))) if batch_size <= rows)
    return 64, warps if head_dim <= WIDE else 8, 0, splits


def attention_fits(cut: Sequence[int], head_dim: int, memory: int) -> bool:
    """Whether the kernel can cut its work so: the numbers of `cut_of`."""
    if len(cut) != 4:
        return False
    tile, warps, stages, splits = cut
    width = 1 << (head_dim - 1).bit_length()
    held = stages * tile * 4 * width <= memory if stages else 4 * tile * width <= 512 * 32 * warps  # in shared memory, or in registers
    return powers_of_two(tile, warps, splits) and tile >= 16 and warps <= 16 and splits <= 64 and 0 <= stages <= 8 and held


class FusedDecodePlan:
    """The memory in which programs of one launch meet, for batches of `batch_size` rows; shared by all layers of a step.

    A row's tokens are cut in tiles of `tile`, dealt to `splits` programs a key head. Launches that share a plan belong to one stream.
    `cut`: the numbers of `cut_of`; empty: those that it gives. Raises `CutError` for a cut that does not fit.
    """

    def __init__(self, batch_size: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device, cut: Sequence[int] = ()):
        self.batch_size, self.num_heads, self.num_kv_heads, self.head_dim = batch_size, num_heads, num_kv_heads, head_dim
        memory = shared_memory(device) if device.type == "cuda" else LARGEST
        if cut and not attention_fits(cut, head_dim, memory):
            raise CutError(f"cut {tuple(cut)} (tile, warps, stages, splits) does not fit heads of {head_dim} in {memory} bytes of memory")
        self.tile, self.warps, self.stages, self.splits = cut or cut_of(batch_size, head_dim, memory)
        # What is not split has no parts: the kernel gets addresses that it never follows.
        held = (1, 1, 1) if self.splits == 1 else (batch_size, num_heads, self.splits)
        self.parts = torch.empty((*held, head_dim), dtype=torch.float32, device=device)
        self.stats = torch.empty((*held, 2), dtype=torch.float32, device=device)
        self.counts = torch.zeros((batch_size, num_kv_heads), dtype=torch.int32, device=device)  # zero again after every launch
        self.handle = register(self)

    def serves(self, lens: Int32[np.ndarray, "B"]) -> bool:
        """Whether rows of these lengths are read about as fast as by a kernel that splits each as its length asks for."""
        total, longest = int(lens.sum()), int(lens.max())
        if self.stages:
            return longest <= self.splits * max(LONG, total // 8)
        return total <= MOST_TOKENS and longest <= MOST_TILES * self.tile * self.splits
