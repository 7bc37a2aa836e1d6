"""The Triton kernels of `ops/elementwise/decode_rows.py`. Import this module only if Triton is installed."""

from typing import Any, cast

import torch
import triton
import triton.language as tl

from nanovllm.ops.triton_parts import soft_capped
from nanovllm.types import Float, Float32, Int32, Int64, Tensor

TOKENS = 8  # tokens per program of `_angles`
LOGITS = 1024  # logits per program of `_capped`


@triton.jit(do_not_specialize=["num_tokens"])
def _angles(positions, inv_freq, cos, sin, num_tokens, factor, HALF: tl.constexpr, HB: tl.constexpr, T: tl.constexpr):
    t, i = tl.program_id(0) * T + tl.arange(0, T), tl.arange(0, HB)
    on = t < num_tokens
    mask = on[:, None] & (i < HALF)[None, :]
    position = tl.load(positions + t, mask=on, other=0).to(tl.float32)
    speed = tl.load(inv_freq + i, mask=i < HALF, other=0.0)[None, :]
    angle, scale = position[:, None] * speed, tl.where(speed == 0, 1.0, factor)
    c, s = tl.cos(angle) * scale, tl.sin(angle) * scale
    at = t[:, None] * (2 * HALF) + i[None, :]
    tl.store(cos + at, c, mask=mask)
    tl.store(cos + at + HALF, c, mask=mask)
    tl.store(sin + at, -s, mask=mask)
    tl.store(sin + at + HALF, s, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _places(
    positions, seq_lens, tables, active, positions_out, slots_out, seq_lens_out, num_rows, width, table_stride, dummy, page_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    on = b < num_rows
    moved = tl.load(active + b, mask=on, other=0)
    seq_len = tl.load(seq_lens + b, mask=on, other=1)
    index = seq_len - 1 + moved
    column = index // page_size
    page = tl.load(tables + b.to(tl.int64) * table_stride + tl.minimum(column, width - 1), mask=on, other=0)
    page = tl.where(column < width, page, dummy)
    tl.store(positions_out + b, tl.load(positions + b, mask=on, other=0) + moved, mask=on)
    tl.store(slots_out + b, page * page_size + index % page_size, mask=on)
    tl.store(seq_lens_out + b, tl.minimum(seq_len + moved, width * page_size), mask=on)


@triton.jit
def _capped(logits, out, count, CAP: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    wide = tl.load(logits + i, mask=i < count, other=0.0).to(tl.float32)
    tl.store(out + i, soft_capped(wide, 1.0 / CAP, CAP).to(out.dtype.element_ty), mask=i < count)


def rotary_angles(
    positions: Int32[Tensor, "T"] | Int64[Tensor, "T"], inv_freq: Float32[Tensor, "half"], factor: float
) -> tuple[Float32[Tensor, "T 1 D"], Float32[Tensor, "T 1 D"]]:
    """Launch the kernel of the op `rotary_angles`."""
    num_tokens, half = positions.shape[0], inv_freq.shape[0]
    cos, sin = (torch.empty((num_tokens, 1, 2 * half), dtype=torch.float32, device=positions.device) for _ in range(2))
    kernel: Any = _angles
    if num_tokens:
        with torch.cuda.device_of(positions):
            grid = (triton.cdiv(num_tokens, TOKENS),)
            kernel[grid](positions, inv_freq, cos, sin, num_tokens, factor, half, triton.next_power_of_2(half), TOKENS)
    return cos, sin


def next_places(
    positions: Int32[Tensor, "B"],
    seq_lens: Int32[Tensor, "B"],
    page_tables: Int32[Tensor, "B P"],
    active: Int32[Tensor, "B"],
    num_pages: int,
    page_size: int,
) -> tuple[Int32[Tensor, "B"], Int32[Tensor, "B"], Int32[Tensor, "B"]]:
    """Launch the kernel of the op `next_places`. Each row of `page_tables` is contiguous."""
    num_rows, width = page_tables.shape
    moved, slots, lens = (torch.empty_like(positions) for _ in range(3))
    kernel: Any = _places
    if num_rows:
        with torch.cuda.device_of(positions):
            kernel[(triton.cdiv(num_rows, 256),)](
                positions, seq_lens, page_tables, active, moved, slots, lens, num_rows, width, page_tables.stride(0), num_pages - 1,
                page_size, 256,
            )  # fmt: skip
    return moved, slots, lens


def capped_logits(logits: Float[Tensor, "R V"], cap: float) -> Float[Tensor, "R V"]:
    """Launch the kernel of the op `capped_logits`. The logits are contiguous."""
    out, kernel = torch.empty_like(logits), cast(Any, _capped)
    if count := logits.numel():
        with torch.cuda.device_of(logits):
            kernel[(triton.cdiv(count, LOGITS),)](logits, out, count, cap, LOGITS)
    return out
