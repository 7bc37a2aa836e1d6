"""Launches that sum small tensors over the GPUs of one host, with what follows: each GPU stores its tensor into the memory of all others.

There are no flags: the data tell that they have come. A place for data is filled with an empty word, of which all bits are set, before
another rank stores into it. The rank that owns the place reads it until no word is empty, and makes it empty again. With all bits set a
float is NaN, and before a tensor is pushed, another NaN takes the place of this one. So no element of a tensor is ever an empty word.

Each program of a launch has places and a turn of its own, whatever the launch's size. It uses one of two places for each other rank, in
turn. Why two are enough: let A and B be the programs of one number on two ranks, and call their launches 0, 1, 2 and so on. A stores
launch n + 2 into the place of launch n on B, which must be empty by then.

1. A stores launch n + 2 after its launch n + 1 has ended, so after it got what B stored in launch n + 1.
2. B stored that after its launch n had ended, so after it had emptied the place of launch n.

Both points need that a launch stores nothing before the launch of the same program before it has ended. Launches of a stream do so. With
programmatic dependent launch a program waits (`gdc_wait`) before it reads its turn. That is a wait for the end of the kernel before it,
which has waited for the one before, and so on: of every kernel that may begin early at least one program waits.

The turn is a number in device memory that only its program reads and writes. So nothing depends on how many launches a captured graph
has, on the order in which graphs are replayed, or on other forms of sums between them. All that counts is that all ranks make the same
launches in the same order, one after another.
"""

from typing import Any, cast

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.ops.distributed.shared_memory import PIECE, PIECE_PLACES, PIECE_TURNS, ROW, ROW_PLACES, ROW_TURNS, Shared
from nanovllm.ops.distributed.triton_meetings import NEAR, SPINS, hopeless
from nanovllm.ops.triton_parts import gained, launch_options
from nanovllm.types import Tensor


@triton.jit
def _words(values):
    """The bits of floats as integers of their size, with another NaN for the one that looks like an empty word (-1)."""
    kind: tl.constexpr = tl.int32 if values.dtype.primitive_bitwidth == 32 else tl.int16  # pyright: ignore[reportAssignmentType]
    bits = values.to(kind, bitcast=True)
    return tl.where(bits == -1, (bits & 0x7FFFFFFF) if kind == tl.int32 else (bits & 0x7FFF), bits)


@triton.jit
def _state(words, gone):
    """0 if no word is empty, 1 if some are, 2 or 3 if `gone` is 2 in some warp: the same in all warps, which may have read other values."""
    return tl.max(tl.max((words == -1).to(tl.int32), 0) | gone, 0)


@triton.jit
def _exchanged(words, here, program, peers, own, places, turns, failed, rank, PLACE: tl.constexpr, SIZE: tl.constexpr, RANKS: tl.constexpr):
    """Push the words of a program to the other ranks, and wait for theirs: `[RANKS, n]`, with our own in the row of this rank.

    `PLACE` is the size of a place in bytes. Words that are not `here` are neither pushed nor waited for.
    """
    kind: tl.constexpr = words.dtype
    size: tl.constexpr = kind.primitive_bitwidth // 8  # pyright: ignore[reportAttributeAccessIssue]
    length: tl.constexpr = words.shape[0]
    column = tl.arange(0, length)
    index = tl.arange(0, RANKS)[:, None]
    turn = (own + turns).to(tl.pointer_type(tl.int32)) + program
    now = tl.load(turn, volatile=True)
    # In the order of the programs, then of the turns, then of the ranks that push.
    first = places + (program * 2 + now) * (SIZE * PLACE)
    for peer in tl.static_range(SIZE):  # pyright: ignore[reportGeneralTypeIssues]
        if peer != rank:
            there = tl.multiple_of((peers[peer] + first + rank * PLACE).to(tl.pointer_type(kind)), 16)  # pyright: ignore[reportArgumentType]
            tl.store(there + column, words, mask=here)
    mine = tl.multiple_of((own + first).to(tl.pointer_type(kind)), 16)  # pyright: ignore[reportArgumentType]
    mine += index * (PLACE // size) + column[None, :]
    waits = (index != rank) & (index < SIZE) & here[None, :]
    found = tl.load(mine, mask=waits, other=0, volatile=True)
    gone, left = now * 0, SPINS
    state = _state(found, gone)
    while (state == 1) & (left > 0):
        found = tl.load(mine, mask=waits, other=0, volatile=True)
        left -= 1
        if left % NEAR == 0:
            gone = tl.where(hopeless(own, failed, left), 2, 0)
        state = _state(found, gone)
    if state != 0:
        tl.store(failed, 1)
    tl.store(mine, tl.zeros_like(found) - 1, mask=waits)
    tl.store(turn, 1 - now)  # not before all warps have read it, as they had before they all knew that no word is empty
    return tl.where(index == rank, words[None, :], found)


@triton.jit
def _sum(words, dtype: tl.constexpr, SIZE: tl.constexpr):
    """The sum of the rows of all ranks, in their order, in float32."""
    index = tl.arange(0, words.shape[0])[:, None]
    wide = words.to(dtype, bitcast=True).to(tl.float32)
    total = tl.zeros((words.shape[1],), tl.float32)
    for peer in tl.static_range(SIZE):  # pyright: ignore[reportGeneralTypeIssues]
        total += tl.sum(tl.where(index == peer, wide, 0.0), 0)
    return total


@triton.jit
def _pushed(
    y, x, out, peers, own, places, turns, failed, n, rank,
    PLACE: tl.constexpr, SIZE: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    kind: tl.constexpr = y.dtype.element_ty
    if PDL:
        gdc_wait()
    words = _words(tl.load(y + at, mask=here, other=0.0))
    residual = tl.load(x + at, mask=here, other=0.0).to(tl.float32) if ADDS else tl.zeros((BLOCK,), tl.float32)
    everyone = _exchanged(words, here, program, peers, own, places, turns, failed, rank, PLACE, SIZE, RANKS)
    tl.store(out + at, (residual + _sum(everyone, kind, SIZE)).to(kind), mask=here)


@triton.jit
def _pushed_norm(
    parts, bias, x, gain, out, normed, peers, own, places, turns, failed, rows, width, eps, rank,
    PLACE: tl.constexpr, SIZE: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr, BIASED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    here, at = column < width, row * width + column
    kind: tl.constexpr = x.dtype.element_ty
    gains = tl.load(gain + column, mask=here, other=0.0)
    part = tl.load(bias + column, mask=here, other=0.0).to(tl.float32) if BIASED else tl.zeros((BLOCK,), tl.float32)
    if PDL:
        gdc_wait()
    for number in tl.static_range(PARTS):  # pyright: ignore[reportGeneralTypeIssues]
        part += tl.load(parts + number * rows * width + at, mask=here, other=0.0).to(tl.float32)
    residual = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    everyone = _exchanged(_words(part.to(kind)), here, row, peers, own, places, turns, failed, rank, PLACE, SIZE, RANKS)
    added = (residual + _sum(everyone, kind, SIZE)).to(kind)
    tl.store(out + at, added, mask=here)
    wide = added.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    tl.store(normed + at, gained(wide * scale, gains, kind), mask=here)


def pushed(y: Tensor, x: Tensor | None, shared: Shared, pdl: bool) -> Tensor:
    """The sum of the ranks' tensors, plus a residual if given, in float32, rounded once.

    Args:
        y: This rank's tensor, contiguous, of at most `PIECES // (PIECE * size)` pieces of `PIECE` bytes.
        x: The residual, of the same shape, or None.
        shared: The memory that the ranks share.
        pdl: Whether the launch may begin before the one before it has ended.
    """
    out, count, block = torch.empty_like(y, memory_format=torch.contiguous_format), y.numel(), PIECE // y.element_size()
    where = shared.peers, shared.peers[shared.rank], PIECE_PLACES, PIECE_TURNS, shared.failed, count, shared.rank
    how: dict[str, Any] = {"PLACE": PIECE, "BLOCK": block, "ADDS": x is not None, "PDL": pdl, **launch_options(1, pdl), **_ranks(shared)}
    with torch.cuda.device_of(y):
        cast(Any, _pushed)[(triton.cdiv(count, block),)](y, y if x is None else x, out, *where, **how)
    return out


def pushed_norm(
    parts: Tensor, bias: Tensor | None, x: Tensor, gain: Tensor, eps: float, shared: Shared, pdl: bool
) -> tuple[Tensor, Tensor]:
    """The residual `x` `[T, M]` plus the sum of the ranks' tensors, and its RMS norm with weight `gain`, each rounded.

    A rank's tensor is the sum of its `parts` `[P, T, M]`, plus a bias if given, rounded. There are at most `NUM_ROWS // size` rows, of at
    most `ROW` bytes. The other arguments are those of `pushed`.
    """
    out, normed = torch.empty_like(x), torch.empty_like(x)
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    where = shared.peers, shared.peers[shared.rank], ROW_PLACES, ROW_TURNS, shared.failed, rows, width, eps, shared.rank
    how: dict[str, Any] = {"PLACE": ROW, "BLOCK": block, "PARTS": len(parts), "BIASED": bias is not None, "PDL": pdl, **_ranks(shared)}
    a_warp = 1024 if shared.size == 2 else 512  # bytes: a thread holds those of all ranks
    options = launch_options(min(16, max(1, int(block) * x.element_size() // a_warp)), pdl)
    with torch.cuda.device_of(x):
        cast(Any, _pushed_norm)[(rows,)](parts, x if bias is None else bias, x, gain, out, normed, *where, **how, **options)
    return out, normed


def _ranks(shared: Shared) -> dict[str, Any]:
    return {"SIZE": shared.size, "RANKS": triton.next_power_of_2(shared.size)}
