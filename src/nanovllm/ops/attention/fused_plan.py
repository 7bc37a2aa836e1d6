"""`FusedDecodePlan`: how the fused decode attention splits rows between programs."""

from collections.abc import Sequence

import numpy as np
import torch

from nanovllm.ops.attention.plan_table import register
from nanovllm.ops.backends import LARGEST, shared_memory
from nanovllm.ops.cuts import CutError, powers_of_two
from nanovllm.types import Int32

# Limits for a batch of few rows: tokens of a row, and of the batch with 8 KV heads or more (more with fewer); tiles of one program.
MOST_TOKENS, MOST_TILES = 1 << 14, 16
FP8_TOKENS = 1 << 12  # tokens of a batch in FP8 whose rows may differ in length as they like
FP8_PROGRAMS = 128  # with fewer, rows of many tokens in FP8 leave multiprocessors idle
PIPELINED = 16  # with more rows there are enough programs to keep many tiles in flight
# (largest number of rows, tile configuration). A configuration is chosen so that a GPU's multiprocessors finish at the same time. So the
# best number of programs does not grow steadily with the rows.
MANY = (
    (48, (64, 4, 3, 1)), (64, (32, 2, 4, 1)), (96, (64, 4, 3, 1)), (128, (32, 2, 4, 1)), (160, (64, 4, 2, 1)), (192, (32, 2, 3, 1)),
    (224, (64, 4, 2, 1)), (0, (32, 2, 4, 1)),
)  # fmt: skip
# The same for up to 32 rows in FP8, of which up to 8 were measured; more rows have those of `MANY`. Tiles in FP8 have half the bytes, so
# more tokens or more tiles are in flight.
FEW_FP8 = ((2, (128, 4, 0, 32)), (8, (64, 2, 4, 8)), (16, (64, 2, 4, 4)), (32, (64, 2, 4, 2)))
# The same for up to `PIPELINED` rows of any lengths in the dtype of the model: so many programs that one long row keeps all
# multiprocessors busy, with many tiles in flight. It is for where FlashInfer has no plans, which take as long for 8 rows of 16,384 tokens
# on an H200 and up to a quarter less for fewer tokens. Rows of at most `MEDIUM` tokens take less with the tile in registers of `cut_of`.
LONG = (64, 4, 3, 32)
MEDIUM = 2048
WIDE = 128  # with more channels per head, the keys and values of a tile and the next tile need the registers of 8 warps
LONG_ROW = 1024  # a row of so many tokens does not delay the other rows of a batch of many rows
# What the tile configurations above are for. With half as many KV heads or fewer, in the dtype of the model, rows have more splits.
KV_HEADS, FEW_KV_HEADS = 8, 4
FEWER = (32, 2, 4)  # tile, warps and stages of more than `PIPELINED` rows that are split
ENOUGH, MOST_SPLITS = 512, 8  # of such rows at most so many programs together, and splits each; half as many splits for more than 32 rows


def cut_of(
    batch_size: int, num_kv_heads: int, head_dim: int, memory: int, *, fp8: bool = False, long: bool = False
) -> tuple[int, int, int, int]:
    """Return the tile configuration that was the fastest of those tried on an H200, or an H100 in FP8: (tile, warps, stages, splits).

    The numbers are tokens per tile, warps per program, tiles in flight (0: one tile, in registers) and splits per row, a power of two.
    Tiles in flight use at most `memory` bytes of shared memory. Each KV head has programs of its own, so few of them, as of one of several
    GPUs, need more splits to keep all multiprocessors busy. `long` is as in `FusedDecodePlan`.
    """
    if long:
        return _largest(LONG, head_dim, memory)
    if fp8 and batch_size <= FEW_FP8[-1][0]:
        tile, warps, stages, splits = next(cut for rows, cut in FEW_FP8 if batch_size <= rows)
        most = memory // (2 * tile << (head_dim - 1).bit_length())
        return tile, warps if head_dim <= WIDE or stages else 8, min(stages, max(1, most)), splits
    if batch_size > PIPELINED:
        best = next(cut for rows, cut in MANY if batch_size <= rows or not rows)
        splits = 1 if fp8 else _splits(batch_size, num_kv_heads)
        return _largest(best if splits == 1 else (*FEWER, splits), head_dim, memory)
    usual = (2, (4, 32)), (4, (8, 4)), (8, (8, 2)), (PIPELINED, (4, 2))
    if num_kv_heads <= FEW_KV_HEADS // 2:
        usual = (2, (4, 32)), (8, (4, 16)), (PIPELINED, (4, 16 // num_kv_heads))
    elif num_kv_heads <= FEW_KV_HEADS:
        usual = (2, (4, 32)), (8, (8, 4)), (PIPELINED, (4, 4))
    warps, splits = next(cut for rows, cut in usual if batch_size <= rows)
    return 64, warps if head_dim <= WIDE else 8, 0, splits


def _splits(batch_size: int, num_kv_heads: int) -> int:
    """How many programs share a row and KV head of a batch of many rows: 1 with more than `FEW_KV_HEADS` of them."""
    if num_kv_heads > FEW_KV_HEADS:
        return 1
    wanted = min(MOST_SPLITS if batch_size <= 32 else MOST_SPLITS // 2, ENOUGH // (batch_size * num_kv_heads))
    return 1 << max(0, wanted.bit_length() - 1)


def _largest(best: tuple[int, int, int, int], head_dim: int, memory: int) -> tuple[int, int, int, int]:
    """The first of `best` and smaller tile configurations whose tiles in flight fit in `memory` bytes of shared memory."""
    token, splits = 4 << (head_dim - 1).bit_length(), best[3]  # bytes of its key and value
    smaller = ((32, 2, 3, splits), (32, 2, 2, splits), (16, 2, 2, splits))
    return next(cut for cut in (best, *smaller) if cut[0] * cut[2] * token <= memory)


def attention_fits(cut: Sequence[int], head_dim: int, memory: int) -> bool:
    """Return whether the kernel can use this tile configuration, in the form of `cut_of`, with `memory` bytes of shared memory."""
    if len(cut) != 4:
        return False
    tile, warps, stages, splits = cut
    width = 1 << (head_dim - 1).bit_length()
    held = stages * tile * 4 * width <= memory if stages else 4 * tile * width <= 512 * 32 * warps  # in shared memory, or in registers
    return powers_of_two(tile, warps, splits) and tile >= 16 and warps <= 16 and splits <= 64 and 0 <= stages <= 8 and held


class FusedDecodePlan:
    """Scratch memory in which the programs of one launch merge partial results, for batches of `batch_size` rows.

    All layers of a step share the plan. A row's tokens are divided into tiles, which `splits` programs per KV head take in turn. All
    launches with one plan must run on one stream. `cut` is a tile configuration in the form of `cut_of`; empty means the result of
    `cut_of`. `fp8` says whether the KV is in FP8. With `long`, the plan is for rows of any lengths, at most `PIPELINED`, not in FP8. Raises
    `CutError` for a configuration that does not fit.
    """

    def __init__(
        self, batch_size: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device, cut: Sequence[int] = (), *,
        fp8: bool = False, long: bool = False,
    ):  # fmt: skip
        self.long, self.fp8 = long, fp8
        self.batch_size, self.num_heads, self.num_kv_heads, self.head_dim = batch_size, num_heads, num_kv_heads, head_dim
        memory = shared_memory(device) if device.type == "cuda" else LARGEST
        if cut and not attention_fits(cut, head_dim, memory):
            raise CutError(f"cut {tuple(cut)} (tile, warps, stages, splits) does not fit head_dim {head_dim} in {memory} bytes of memory")
        self.tile, self.warps, self.stages, self.splits = cut or cut_of(batch_size, num_kv_heads, head_dim, memory, fp8=fp8, long=long)
        # Rows that are not split have no partial results: the kernel gets addresses that it never uses.
        shape = (1, 1, 1) if self.splits == 1 else (batch_size, num_heads, self.splits)
        self.parts = torch.empty((*shape, head_dim), dtype=torch.float32, device=device)
        self.stats = torch.empty((*shape, 2), dtype=torch.float32, device=device)
        self.counts = torch.zeros((batch_size, num_kv_heads), dtype=torch.int32, device=device)  # zero again after every launch
        self.handle = register(self)

    def serves(self, lens: Int32[np.ndarray, "B"]) -> bool:
        """Return whether this plan reads rows of these lengths about as fast as a kernel that splits each row by its length."""
        total, longest = int(lens.sum()), int(lens.max())
        if self.long:
            return True
        if self.fp8 and self.batch_size <= PIPELINED:
            many = self.splits * self.batch_size * self.num_kv_heads >= FP8_PROGRAMS
            return total <= FP8_TOKENS or (many and longest * len(lens) <= 2 * total)
        heads = KV_HEADS if self.fp8 else min(self.num_kv_heads, KV_HEADS)  # the fewer, the less a token takes; in FP8 not measured
        if self.stages:
            return longest <= max(total // 8, self.splits * max(LONG_ROW, total * heads // (8 * KV_HEADS)))
        most = min(MOST_TOKENS, MOST_TILES * self.tile * self.splits)
        return total * heads <= MOST_TOKENS * KV_HEADS and longest <= most
