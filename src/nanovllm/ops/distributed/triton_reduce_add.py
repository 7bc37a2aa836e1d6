"""One launch that sums a tensor over the GPUs of one host and adds the residual: each GPU reads the tensors of all.

Every program copies its block into memory that the others can read, tells the programs of the same number on the other GPUs, waits for
them, and sums the blocks in the order of the ranks. A flag is set by one rank and cleared by the rank that waits for it, so a captured
launch can be replayed. Consecutive launches use two places of that memory in turn: a rank may still read the one while another rank
already writes the other. A wait has a bound, after which the launch notes its failure in host memory and ends.
"""

import torch
import triton
import triton.language as tl

from nanovllm.types import Tensor

BLOCK = 1024  # elements of a program
SPINS = tl.constexpr(50_000_000)  # tries before a wait fails: some ten seconds


@triton.jit
def _wait(flag, expected, then):
    """Exchange the value of a flag for another one, once it is the expected one. Returns whether it was."""
    found = tl.atomic_cas(flag, expected, then, sem="acq_rel", scope="sys")
    left = SPINS
    while (found != expected) & (left > 0):
        found = tl.atomic_cas(flag, expected, then, sem="acq_rel", scope="sys")
        left -= 1
    return found == expected


@triton.jit
def _reduce_add(y, x, out, table, failed, n, rank, data, flags, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    kind = tl.pointer_type(y.dtype.element_ty)
    own = tl.load(table + rank)
    tl.store(tl.multiple_of((own + data).to(kind), 16) + at, tl.load(y + at, mask=here), mask=here)
    tl.debug_barrier()
    good = True
    for peer in tl.static_range(SIZE):
        if peer != rank:
            there = (tl.load(table + peer) + flags).to(tl.pointer_type(tl.int32)) + program * SIZE + rank
            good = good & _wait(there, 0, 1)
    for peer in tl.static_range(SIZE):
        if peer != rank:
            mine = (own + flags).to(tl.pointer_type(tl.int32)) + program * SIZE + peer
            good = good & _wait(mine, 1, 0)
    tl.debug_barrier()
    total = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    summed = tl.zeros((BLOCK,), tl.float32)
    for peer in tl.static_range(SIZE):
        part = tl.multiple_of((tl.load(table + peer) + data).to(kind), 16)
        summed += tl.load(part + at, mask=here, other=0.0, cache_modifier=".cg").to(tl.float32)
    tl.store(out + at, (total + summed).to(out.dtype.element_ty), mask=here)
    if not good:
        tl.store(failed, 1)


def reduce_add(y: Tensor, x: Tensor, table: Tensor, failed: Tensor, rank: int, size: int, data: int, flags: int) -> Tensor:
    """The residual plus the sum of the ranks' tensors, in float32, rounded once.

    Args:
        y: This rank's tensor, contiguous.
        x: The residual, of the same shape.
        table: The addresses of all ranks' symmetric memory on this GPU, int64 `[size]`.
        failed: One int32 in pinned memory, which becomes 1 if a rank does not come.
        rank: This rank.
        size: The number of ranks.
        data: Where the tensors are in that memory, in bytes.
        flags: Where the flags are: `size` int32 for each program, zero before the first launch.
    """
    out, count = torch.empty_like(x, memory_format=torch.contiguous_format), y.numel()
    _reduce_add[(triton.cdiv(count, BLOCK),)](y, x, out, table, failed, count, rank, data, flags, SIZE=size, BLOCK=BLOCK, num_warps=4)
    return out
