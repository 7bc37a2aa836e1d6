"""The Triton kernels of `uniforms`, `draw` and `highest`, for a GPU or Triton's interpreter (`TRITON_INTERPRET=1`)."""

from typing import Any

import torch
import triton
import triton.language as tl

from nanovllm.ops.sampling.philox import STREAM

NUM_WARPS = 4
BLOCK = 2048  # logits per program of `highest`
COUNTERS = 512  # counters per program; each gives four numbers, so a program has 2,048 tokens
_STREAM = tl.constexpr(STREAM)
_FINE = tl.constexpr(2.0**-9)
_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)
_THIRD = tl.constexpr(1.0 / 3.0)


@triton.jit
def _uniforms(seed, position, first_counter, COUNTERS: tl.constexpr):
    """Return numbers 4 * first_counter, ... of a key, in order. `ops/sampling/uniforms.py` describes the counter and the conversion."""
    c0 = (first_counter + tl.arange(0, COUNTERS)).to(tl.uint32)
    zero = c0 * 0
    c2 = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    c3 = zero + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, c0, zero + _STREAM, c2, c3)  # pyright: ignore[reportGeneralTypeIssues]
    w = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    # 23 bits are the fraction of a float in [1, 2). The following operations are exact; converting integers to floats would be slow.
    fine = w < 8388608
    u = (tl.where(fine, w, w >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - _BELOW_ONE
    return tl.where(fine, u * _FINE, u)


@triton.jit
def _uniforms_kernel(keys, out, num, COUNTERS: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * COUNTERS
    u = _uniforms(tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1), first, COUNTERS)
    index = 4 * first + tl.arange(0, 4 * COUNTERS)
    tl.store(out + row * num + index, u, mask=index < num)


@triton.jit
def _draw_kernel(
    logits, stride, temperature, least, keys, best, best_id, num, counter,
    HAS_LEAST: tl.constexpr, COUNTERS: tl.constexpr, LEAD: tl.constexpr,
):  # fmt: skip
    """Program (block, row) finds the best token of one block of a row, whose first column is the token `4 * counter + LEAD`."""
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * COUNTERS
    index = 4 * block + tl.arange(0, 4 * COUNTERS) - LEAD
    there = index < num
    if LEAD:
        there = there & (index >= 0)
    first = counter + block
    y = tl.load(logits + row * stride + index, mask=there, other=-float("inf")).to(tl.float32)
    t = tl.load(temperature + row)
    if t > 0:
        if HAS_LEAST:
            y = tl.where(y < tl.load(least + row), -float("inf"), y)
        u = _uniforms(tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1), first, COUNTERS)
        exponential = tl.where(u < 0.001953125, u + u * u * (0.5 + u * _THIRD), -tl.log(1.0 - u))
        y -= t * tl.log(exponential)
    value = tl.max(y, 0)
    at = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(best + at, value)
    # NaN does not equal itself, so the bound keeps the id in the vocabulary.
    tl.store(best_id + at, 4 * counter + LEAD + tl.min(tl.where((y == value) & there, index, num - 1), 0))


@triton.jit
def _highest_kernel(logits, stride, best, best_id, num, first, BLOCK: tl.constexpr):
    """Program (block, row) finds the largest logit of one block of a row, whose first column is the token `first`."""
    row = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = index < num
    y = tl.load(logits + row * stride + index, mask=there, other=-float("inf")).to(tl.float32)
    value = tl.max(y, 0)
    at = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(best + at, value)
    tl.store(best_id + at, first + tl.min(tl.where((y == value) & there, index, num - 1), 0))


@triton.jit
def _merge_kernel(best, best_id, out, num, num_blocks, BLOCKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCKS)
    there = index < num_blocks
    y = tl.load(best + row * num_blocks + index, mask=there, other=-float("inf"))
    ids = tl.load(best_id + row * num_blocks + index, mask=there, other=num - 1)
    tl.store(out + row, tl.min(tl.where(y == tl.max(y, 0), ids, num - 1), 0))


def launch_uniforms(keys: torch.Tensor, num: int) -> torch.Tensor:
    """Launch the kernel of the op `uniforms`."""
    out = torch.empty((keys.shape[0], num), dtype=torch.float32, device=keys.device)
    if out.numel() > 0:
        with torch.cuda.device_of(keys):
            grid = (triton.cdiv(num, 4 * COUNTERS), keys.shape[0])
            kernel: Any = _uniforms_kernel
            kernel[grid](keys.contiguous(), out, num, COUNTERS=COUNTERS, num_warps=NUM_WARPS)
    return out


def launch_highest(logits: torch.Tensor) -> torch.Tensor:
    """Launch the kernels of the op `highest`, for at most 65,535 rows."""
    return _merged(*highest_of_blocks(logits, 0, logits.shape[1]), logits.shape[1])


def launch_draw(logits: torch.Tensor, temperature: torch.Tensor, least: torch.Tensor | None, keys: torch.Tensor) -> torch.Tensor:
    """Launch the kernels of the op `draw`, for at most 65,535 rows."""
    return _merged(*drawn_of_blocks(logits, temperature, least, keys, 0, logits.shape[1]), logits.shape[1])


def highest_of_blocks(logits: torch.Tensor, first: int, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logits of the blocks of each row, float32 `[B, K]`, and their token ids, int32 `[B, K]`.

    Args:
        logits: Logits of a part of the vocabulary, `[B, N]`, for at most 65,535 rows.
        first: The token of the first column.
        num: How many columns are tokens; the others are left out. If there is none, every row has -inf.
    """
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_blocks = max(1, -(-num // BLOCK))
    best, best_id = _candidates(logits, num_blocks)
    if len(logits):
        kernel: Any = _highest_kernel
        with torch.cuda.device_of(logits):
            kernel[(num_blocks, len(logits))](logits, logits.stride(0), best, best_id, num, first, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return best, best_id


def drawn_of_blocks(
    logits: torch.Tensor, temperature: torch.Tensor, least: torch.Tensor | None, keys: torch.Tensor, first: int, num: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest sums of logit and noise of the blocks of each row, float32 `[B, K]`, and their token ids, int32 `[B, K]`.

    `first` and `num` are as in `highest_of_blocks`, the other arguments those of the op `draw`.
    """
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    counter, lead = divmod(first, 4)
    num_blocks = max(1, -(-(lead + num) // (4 * COUNTERS)))
    best, best_id = _candidates(logits, num_blocks)
    temperature = temperature.contiguous()
    if len(logits):
        kernel: Any = _draw_kernel
        with torch.cuda.device_of(logits):
            kernel[(num_blocks, len(logits))](
                logits,
                logits.stride(0),
                temperature,
                temperature if least is None else least.contiguous(),
                keys.contiguous(),
                best,
                best_id,
                num,
                counter,
                HAS_LEAST=least is not None,
                COUNTERS=COUNTERS,
                LEAD=lead,
                num_warps=NUM_WARPS,
            )
    return best, best_id


def _candidates(logits: torch.Tensor, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the best token of each block of each row: its value and its id."""
    shape = len(logits), num_blocks
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


def _merged(best: torch.Tensor, best_id: torch.Tensor, num: int) -> torch.Tensor:
    """The best token of each row, int32 `[B]`, of those of its blocks."""
    rows, num_blocks = best.shape
    out = best_id.new_empty(rows)
    if rows:
        merge: Any = _merge_kernel
        with torch.cuda.device_of(best):
            merge[(rows,)](best, best_id, out, num, num_blocks, BLOCKS=triton.next_power_of_2(num_blocks), num_warps=1)
    return out
