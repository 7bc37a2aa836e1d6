"""Launches that sum or gather tensors over the GPUs of one host, with what follows: each GPU reads the tensors of all.

Every program copies its block into memory that the others can read, tells the programs of the same number on the other GPUs, waits for
them, and sums the blocks in the order of the ranks. A flag is set by one rank and cleared by the rank that waits for it, so a captured
launch can be replayed. Consecutive sums use two places of that memory in turn: a rank may still read the one while another rank already
writes the other. A wait ends if the host gives up, because a rank has gone, or after a bound: the launch then notes it in host memory.
"""

from typing import Any, cast

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.ops.distributed import shared_memory
from nanovllm.ops.distributed.shared_memory import Shared
from nanovllm.ops.triton_parts import gained, launch_options
from nanovllm.types import Tensor

BLOCK = 1024  # elements of a program that sums
COLUMNS = 4096  # columns of a program that gathers
SHARED = 4096  # elements of a program whose ranks share the summing
GIVEN_UP = tl.constexpr(shared_memory.GIVEN_UP)
SPINS = tl.constexpr(200_000_000)  # tries before a wait fails: some minutes
# Tries between two looks at whether the host has given up: some 10 ms. The looks of all programs go over PCIe one after another, half a
# microsecond each. If a rank that is late by less than that made the others look, they would be late for the next launch, and so on.
LOOK = tl.constexpr(1 << 15)
# Tries between two looks at whether an earlier launch of this GPU has found that out, in its own memory: some 100 us. All launches that are
# still queued then end without waiting as long.
NEAR = tl.constexpr(1 << 7)


@triton.jit
def hopeless(own, failed, left):
    """Whether to stop waiting, with `left` tries left: the host has given up. `own` is the address of this GPU's memory.

    Warps may read different numbers from the host's memory. An atomic operation tells all of them the same.
    """
    given_up = (own + GIVEN_UP).to(tl.pointer_type(tl.int32))
    if left % LOOK == 0:
        tl.store(given_up, 1, mask=tl.load(failed, volatile=True) != 0)
    return tl.atomic_or(given_up, 0, sem="relaxed") != 0


@triton.jit
def exchanged(flag, expected, then, own, failed):
    """Exchange the value of a flag for another one, once it is the expected one. Returns whether it was, or the host has given up."""
    found = tl.atomic_cas(flag, expected, then, sem="acq_rel", scope="sys")
    left = SPINS
    while (found != expected) & (left > 0):
        found = tl.atomic_cas(flag, expected, then, sem="acq_rel", scope="sys")
        left -= 1
        if left % NEAR == 0:
            left = tl.where(hopeless(own, failed, left), 0, left)
    return found == expected


@triton.jit
def _tell(table, own, flags, program, rank, failed, SIZE: tl.constexpr):
    """Set this rank's flags on the other GPUs. Returns whether all could be set."""
    good = True
    for peer in tl.static_range(SIZE):  # pyright: ignore[reportGeneralTypeIssues]
        if peer != rank:
            there = (tl.load(table + peer) + flags).to(tl.pointer_type(tl.int32)) + program * SIZE + rank
            good = good & exchanged(there, 0, 1, own, failed)
    return good


@triton.jit
def _hear(own, flags, program, rank, failed, SIZE: tl.constexpr):
    """Wait for the flags of the other ranks, and clear them. Returns whether all came."""
    good = True
    for peer in tl.static_range(SIZE):  # pyright: ignore[reportGeneralTypeIssues]
        if peer != rank:
            mine = (own + flags).to(tl.pointer_type(tl.int32)) + program * SIZE + peer
            good = good & exchanged(mine, 1, 0, own, failed)
    return good


@triton.jit
def _meet(table, own, flags, program, rank, failed, SIZE: tl.constexpr):
    """Wait until the programs of this number on all GPUs have come here. What they stored before can then be read."""
    tl.debug_barrier()
    told = _tell(table, own, flags, program, rank, failed, SIZE)
    heard = _hear(own, flags, program, rank, failed, SIZE)
    tl.debug_barrier()
    if not (told & heard):
        tl.store(failed, 1)


@triton.jit
def _sum(table, data, at, here, kind: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of the ranks' elements, in the order of the ranks."""
    total = tl.zeros((BLOCK,), tl.float32)
    for peer in tl.static_range(SIZE):
        part = tl.multiple_of((tl.load(table + peer) + data).to(tl.pointer_type(kind)), 16)
        total += tl.load(part + at, mask=here, other=0.0, cache_modifier=".cg").to(tl.float32)
    return total


@triton.jit
def _reduce(y, x, out, table, failed, n, rank, data, flags, SIZE: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    kind: tl.constexpr = y.dtype.element_ty
    own = tl.load(table + rank)
    if PDL:
        gdc_wait()
    tl.store(tl.multiple_of((own + data).to(tl.pointer_type(kind)), 16) + at, tl.load(y + at, mask=here), mask=here)  # pyright: ignore[reportArgumentType]
    residual = tl.load(x + at, mask=here, other=0.0).to(tl.float32) if ADDS else tl.zeros((BLOCK,), tl.float32)
    _meet(table, own, flags, program, rank, failed, SIZE)
    tl.store(out + at, (residual + _sum(table, data, at, here, kind, SIZE, BLOCK)).to(kind), mask=here)
    if not ADDS:
        _meet(table, own, flags, program, rank, failed, SIZE)  # the next launch may overwrite what the others have read by now


@triton.jit
def _share_sum(
    y, out, table, failed, n, rank, data, flags, SIZE: tl.constexpr, BLOCK: tl.constexpr, EACH: tl.constexpr, PADDED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Each rank sums EACH elements of a block, and stores the sums into the memory of all ranks."""
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    begin = program.to(tl.int64) * BLOCK
    at = begin + tl.arange(0, BLOCK)
    here = at < n
    kind: tl.constexpr = y.dtype.element_ty
    own = tl.load(table + rank)
    if PDL:
        gdc_wait()
    mine = tl.multiple_of((own + data).to(tl.pointer_type(kind)), 16)  # pyright: ignore[reportArgumentType]
    tl.store(mine + at, tl.load(y + at, mask=here), mask=here)  # pyright: ignore[reportArgumentType]
    _meet(table, own, flags, program, rank, failed, SIZE)
    part = rank * EACH + tl.arange(0, PADDED)
    shared = begin + part
    there = (tl.arange(0, PADDED) < EACH) & (part < BLOCK) & (shared < n)
    total = _sum(table, data, shared, there, kind, SIZE, PADDED).to(kind)
    for peer in tl.static_range(SIZE):
        tl.store((tl.load(table + peer) + data).to(tl.pointer_type(kind)) + shared, total, mask=there)
    _meet(table, own, flags, program, rank, failed, SIZE)
    tl.store(out + at, tl.load(mine + at, mask=here, cache_modifier=".cg"), mask=here)


@triton.jit
def _reduce_norm(
    parts, bias, x, gain, out, normed, table, failed, rows, width, eps, rank, data, flags,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, BIASED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    here, at = column < width, row * width + column
    kind: tl.constexpr = x.dtype.element_ty
    own = tl.load(table + rank)
    gains = tl.load(gain + column, mask=here, other=0.0)
    part = tl.load(bias + column, mask=here, other=0.0).to(tl.float32) if BIASED else tl.zeros((BLOCK,), tl.float32)
    if PDL:
        gdc_wait()
    for number in tl.static_range(PARTS):  # pyright: ignore[reportGeneralTypeIssues]
        part += tl.load(parts + number * rows * width + at, mask=here, other=0.0).to(tl.float32)
    tl.store(tl.multiple_of((own + data).to(tl.pointer_type(kind)), 16) + at, part.to(kind), mask=here)  # pyright: ignore[reportArgumentType]
    residual = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    _meet(table, own, flags, row, rank, failed, SIZE)
    added = (residual + _sum(table, data, at, here, kind, SIZE, BLOCK)).to(kind)
    tl.store(out + at, added, mask=here)
    wide = added.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    tl.store(normed + at, gained(wide * scale, gains, kind), mask=here)


@triton.jit
def _gather(y, out, table, failed, columns, most, rank, data, flags, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row, block = tl.program_id(0), tl.program_id(1)
    program = row * tl.num_programs(1) + block
    column = block * BLOCK + tl.arange(0, BLOCK)
    here, at = column < columns, row * columns + column
    kind: tl.constexpr = y.dtype.element_ty
    own = tl.load(table + rank)
    tl.store((own + data).to(tl.pointer_type(kind)) + at, tl.load(y + at, mask=here), mask=here)  # pyright: ignore[reportArgumentType]
    _meet(table, own, flags, program, rank, failed, SIZE)
    for peer in tl.static_range(SIZE):
        part = (tl.load(table + peer) + data).to(tl.pointer_type(kind))
        place = peer * columns + column
        tl.store(out + row * most + place, tl.load(part + at, mask=here, cache_modifier=".cg"), mask=here & (place < most))
    _meet(table, own, flags, program, rank, failed, SIZE)  # the next launch may overwrite what the others have read by now


def reduce(y: Tensor, x: Tensor | None, shared: Shared, data: int, flags: int, pdl: bool) -> Tensor:
    """The sum of the ranks' tensors, plus a residual if given, in float32, rounded once.

    Args:
        y: This rank's tensor, contiguous.
        x: The residual, of the same shape, or None. Without it any launch may follow, with it one that uses other memory.
        shared: The memory that the ranks share.
        data: Where the tensors are in that memory, in bytes.
        flags: Where the flags are: `size` int32 for each program, zero before the first launch.
        pdl: Whether the launch may begin before the one before it has ended.
    """
    out, count = torch.empty_like(y, memory_format=torch.contiguous_format), y.numel()
    place = shared.table, shared.failed, count, shared.rank, data, flags
    how: dict[str, Any] = {"SIZE": shared.size, "BLOCK": BLOCK, "ADDS": x is not None, "PDL": pdl, **launch_options(4, pdl)}
    with torch.cuda.device_of(y):
        cast(Any, _reduce)[(triton.cdiv(count, BLOCK),)](y, y if x is None else x, out, *place, **how)
    return out


def reduce_in_shares(y: Tensor, shared: Shared, data: int, flags: int, pdl: bool) -> Tensor:
    """The sum of the ranks' tensors. Each rank sums a share of every block, so less crosses between the GPUs than with `reduce`.

    Arguments and result are those of `reduce` without a residual.
    """
    out, count, each = torch.empty_like(y, memory_format=torch.contiguous_format), y.numel(), triton.cdiv(SHARED, shared.size)
    place = shared.table, shared.failed, count, shared.rank, data, flags
    how: dict[str, Any] = {"SIZE": shared.size, "BLOCK": SHARED, "EACH": each, "PADDED": triton.next_power_of_2(each), "PDL": pdl}
    with torch.cuda.device_of(y):
        cast(Any, _share_sum)[(triton.cdiv(count, SHARED),)](y, out, *place, **how, **launch_options(8, pdl))
    return out


def reduce_norm(
    parts: Tensor, bias: Tensor | None, x: Tensor, gain: Tensor, eps: float, shared: Shared, data: int, flags: int, pdl: bool
) -> tuple[Tensor, Tensor]:
    """The residual `x` `[T, M]` plus the sum of the ranks' tensors, and its RMS norm with weight `gain`, each rounded.

    A rank's tensor is the sum of its `parts` `[P, T, M]`, plus a bias if given, rounded. The other arguments are those of `reduce`.
    """
    out, normed = torch.empty_like(x), torch.empty_like(x)
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    place = shared.table, shared.failed, rows, width, eps, shared.rank, data, flags
    how: dict[str, Any] = {"SIZE": shared.size, "BLOCK": block, "PARTS": len(parts), "BIASED": bias is not None, "PDL": pdl}
    with torch.cuda.device_of(x):
        cast(Any, _reduce_norm)[(rows,)](
            parts,
            x if bias is None else bias,
            x,
            gain,
            out,
            normed,
            *place,
            **how,
            **launch_options(min(16, max(4, int(block) // 512)), pdl),
        )
    return out, normed


def gather_columns(y: Tensor, most: int, shared: Shared, data: int, flags: int) -> Tensor:
    """The ranks' columns side by side, `[R, most]`, from `[R, N]` each. All fit into the memory from `data` on."""
    rows, columns = y.shape
    out = y.new_empty((rows, most))
    place = shared.table, shared.failed, columns, most, shared.rank, data, flags
    with torch.cuda.device_of(y):
        cast(Any, _gather)[(rows, triton.cdiv(columns, COLUMNS))](y, out, *place, SIZE=shared.size, BLOCK=COLUMNS, num_warps=4)
    return out
