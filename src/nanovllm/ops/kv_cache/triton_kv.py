"""The Triton kernels around paged memory: token writes, page copies, moves, last-page lengths.

Import this module only if Triton is installed.
"""

# pyright: reportGeneralTypeIssues=false
# (because kernels return tuples)

from typing import Any

import torch
import triton
import triton.language as tl

from nanovllm.ops.kv_cache.fp8 import head_dim_of, in_fp8
from nanovllm.ops.kv_cache.triton_fp8 import quantised_heads, scales_of, slot_of_head
from nanovllm.types import Float, Float32, Int32, Tensor

MOVED = 16  # tokens that one program moves


@triton.jit
def _kv_write(pages, k, v, slots, page_stride, k_stride, v_stride, K: tl.constexpr, S: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """One program per token writes all key and value heads of the token."""
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + t).to(tl.int64)
    i = tl.arange(0, BLOCK)
    ok = i < K * D
    at = pages + slot // S * page_stride + (i // D * S + slot % S) * D + i % D
    tl.store(at, tl.load(k + t * k_stride + i, mask=ok), mask=ok)
    tl.store(at + K * S * D, tl.load(v + t * v_stride + i, mask=ok), mask=ok)


@triton.jit
def _kv_write_fp8(
    pages, k, v, slots, page_stride, k_stride, v_stride, K: tl.constexpr, S: tl.constexpr, D: tl.constexpr, KP: tl.constexpr,
    DP: tl.constexpr,
):  # fmt: skip
    """One program per token and keys or values rounds all heads of the token, and writes codes and scales."""
    t, values = tl.program_id(0).to(tl.int64), tl.program_id(1) == 1
    slot = tl.load(slots + t).to(tl.int64)
    head, d = tl.arange(0, KP), tl.arange(0, DP)
    ok = (head < K)[:, None] & (d < D)[None, :]
    source = tl.where(values, v + t * v_stride, k + t * k_stride)
    codes, scale = quantised_heads(tl.load(source + head[:, None] * D + d[None, :], mask=ok, other=0.0))
    page, x = pages + slot // S * page_stride, tl.where(values, K, 0) + head
    tl.store(page + slot_of_head(x, slot % S, S, D, True)[:, None] + d[None, :], codes, mask=ok)
    tl.store(scales_of(page, x, slot % S, S, D), scale, mask=head < K)


@triton.jit
def _copy_pages(pages, src, dst, layer_stride, page_size_in_elements, BLOCK: tl.constexpr):
    """Program (pair, layer, block) copies one block of one page in one layer."""
    n, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    ok = i < page_size_in_elements
    base = pages + layer * layer_stride + i
    page = tl.load(base + tl.load(src + n).to(tl.int64) * page_size_in_elements, mask=ok)
    tl.store(base + tl.load(dst + n).to(tl.int64) * page_size_in_elements, page, mask=ok)


# The ids are parts of a longer tensor, which begin anywhere in it: one kernel serves all.
@triton.jit(do_not_specialize_on_alignment=["ids"])
def _move_images(pages, ids, images, layer_stride, page_size_in_elements, GATHERED: tl.constexpr, BLOCK: tl.constexpr):
    """Program (image, layer, block) copies one block of one page in one layer to its image, or back."""
    n, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    i = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    ok = i < page_size_in_elements
    page = pages + layer * layer_stride + tl.load(ids + n).to(tl.int64) * page_size_in_elements + i
    image = images + (n * tl.num_programs(1) + layer) * page_size_in_elements + i
    if GATHERED:
        tl.store(image, tl.load(page, mask=ok), mask=ok)
    else:
        tl.store(page, tl.load(image, mask=ok), mask=ok)


@triton.jit
def _move_kv(
    pages, src, dst, shift, inv_freq, num_tokens, layer_stride, page_stride, S: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr,
    HB: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Program (T tokens, layer) moves all key and value heads; it computes the angles once for all heads."""
    t, layer = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1).to(tl.int64)
    on, i = t < num_tokens, tl.arange(0, HB)[None, :]
    source, target = tl.load(src + t, mask=on, other=0).to(tl.int64), tl.load(dst + t, mask=on, other=0).to(tl.int64)
    positions = tl.load(shift + t, mask=on, other=0)[:, None]
    angle = positions.to(tl.float32) * tl.load(inv_freq + i, mask=i < HALF, other=0.0)
    cos, sin, moved = tl.cos(angle), tl.sin(angle), positions != 0
    ok = on[:, None] & (i < HALF)
    base = pages + layer * layer_stride
    read = base + (source // S * page_stride + source % S * (2 * HALF))[:, None] + i
    write = base + (target // S * page_stride + target % S * (2 * HALF))[:, None] + i
    values = K * S * 2 * HALF
    for head in range(K):
        here = head * (S * 2 * HALF)
        low, high = tl.load(read + here, mask=ok), tl.load(read + here + HALF, mask=ok)
        v_low, v_high = tl.load(read + values + here, mask=ok), tl.load(read + values + here + HALF, mask=ok)
        a, b = low.to(tl.float32), high.to(tl.float32)
        tl.store(write + here, tl.where(moved, (a * cos - b * sin).to(low.dtype), low), mask=ok)
        tl.store(write + here + HALF, tl.where(moved, (b * cos + a * sin).to(low.dtype), high), mask=ok)
        tl.store(write + values + here, v_low, mask=ok)
        tl.store(write + values + here + HALF, v_high, mask=ok)


@triton.jit
def _move_kv_fp8(
    pages, src, dst, shift, inv_freq, layer_stride, page_stride, S: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, KP: tl.constexpr,
    DP: tl.constexpr,
):  # fmt: skip
    """Program (token, layer) moves all heads of one token: it copies codes and scales, or rotates keys and rounds them again."""
    D: tl.constexpr = 2 * HALF
    t, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    source, target, moved = tl.load(src + t).to(tl.int64), tl.load(dst + t).to(tl.int64), tl.load(shift + t)
    head, d = tl.arange(0, KP), tl.arange(0, DP)
    inside, here = d < D, head < K
    ok = here[:, None] & inside[None, :]
    base = pages + layer * layer_stride
    read, write = base + source // S * page_stride, base + target // S * page_stride
    own = slot_of_head(head, source % S, S, D, True)[:, None]
    to = slot_of_head(head, target % S, S, D, True)[:, None] + d[None, :]
    codes = tl.load(read + own + d[None, :], mask=ok, other=0.0)
    scale = tl.load(scales_of(read, head, source % S, S, D), mask=here, other=0.0)
    if moved != 0:
        turned = tl.where(d < HALF, d + HALF, d - HALF)
        angle = moved.to(tl.float32) * tl.load(inv_freq + d % HALF, mask=inside, other=0.0)
        cos, sin = tl.cos(angle), tl.where(d < HALF, -tl.sin(angle), tl.sin(angle))
        far = tl.load(read + own + turned[None, :], mask=ok, other=0.0).to(tl.float32) * scale[:, None]
        codes, scale = quantised_heads(codes.to(tl.float32) * scale[:, None] * cos[None, :] + far * sin[None, :])
    tl.store(write + to, codes, mask=ok)
    tl.store(scales_of(write, head, target % S, S, D), scale, mask=here)
    value = tl.load(read + slot_of_head(K + head, source % S, S, D, True)[:, None] + d[None, :], mask=ok, other=0.0)
    scale = tl.load(scales_of(read, K + head, source % S, S, D), mask=here, other=0.0)
    tl.store(write + slot_of_head(K + head, target % S, S, D, True)[:, None] + d[None, :], value, mask=ok)
    tl.store(scales_of(write, K + head, target % S, S, D), scale, mask=here)


@triton.jit
def _last_page_lens(out, seq_lens, kv_indptr, page_size, num_rows, BLOCK: tl.constexpr):
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = b < num_rows
    num_pages = tl.load(kv_indptr + b + 1, mask=ok) - tl.load(kv_indptr + b, mask=ok)
    tl.store(out + b, tl.load(seq_lens + b, mask=ok) - (num_pages - 1) * page_size, mask=ok)


def kv_write(pages: Float[Tensor, "N 2 K S W"], k: Float[Tensor, "T K D"], v: Float[Tensor, "T K D"], slots: Int32[Tensor, "T"]) -> None:
    """Write tokens into one layer's pages in one launch. Tokens of `k` and `v` may have any stride; other layouts are copied first."""
    (_, _, num_kv_heads, page_size, _), head_dim = pages.shape, head_dim_of(pages)
    if k.shape[0] == 0:
        return
    if k.stride()[1:] != (head_dim, 1):
        k = k.contiguous()
    if v.stride()[1:] != (head_dim, 1):
        v = v.contiguous()
    if in_fp8(pages):
        rounds: Any = _kv_write_fp8
        sizes = (num_kv_heads, page_size, head_dim, triton.next_power_of_2(num_kv_heads), triton.next_power_of_2(head_dim))
        with torch.cuda.device_of(pages):
            rounds[(k.shape[0], 2)](pages, k, v, slots, pages.stride(0), k.stride(0), v.stride(0), *sizes)
        return
    block = triton.next_power_of_2(num_kv_heads * head_dim)
    sizes = (num_kv_heads, page_size, head_dim, block)
    launch: Any = _kv_write
    with torch.cuda.device_of(pages):
        launch[(k.shape[0],)](pages, k, v, slots, pages.stride(0), k.stride(0), v.stride(0), *sizes)


def copy_pages(pages: Tensor, src: Int32[Tensor, "n"], dst: Int32[Tensor, "n"]) -> None:
    """Copy pages in all layers, in one launch and without temporary memory."""
    if src.shape[0] == 0:
        return
    elements = pages.stride(1)
    block = min(4096, triton.next_power_of_2(elements))
    launch: Any = _copy_pages
    with torch.cuda.device_of(pages):
        launch[(src.shape[0], pages.shape[0], triton.cdiv(elements, block))](pages, src, dst, pages.stride(0), elements, block)


def move_images(pages: Tensor, ids: Int32[Tensor, "n"], images: Tensor, *, gathered: bool) -> None:
    """Copy pages of all layers to contiguous images, or back, in one launch and without temporary memory."""
    if ids.shape[0] == 0:
        return
    elements = pages.stride(1)
    block = min(4096, triton.next_power_of_2(elements))
    launch: Any = _move_images
    with torch.cuda.device_of(pages):
        grid = (ids.shape[0], pages.shape[0], triton.cdiv(elements, block))
        launch[grid](pages, ids, images, pages.stride(0), elements, gathered, block)


def move_kv(
    pages: Float[Tensor, "L N 2 K S W"],
    src: Int32[Tensor, "T"],
    dst: Int32[Tensor, "T"],
    shift: Int32[Tensor, "T"],
    inv_freq: Float32[Tensor, "half"],
) -> None:
    """Copy tokens to other slots in all layers and rotate their keys, in one launch and without temporary memory."""
    num_tokens, (num_layers, _, _, num_kv_heads, page_size, _) = src.shape[0], pages.shape
    if num_tokens == 0:
        return
    half = inv_freq.shape[0]
    if in_fp8(pages):
        moves: Any = _move_kv_fp8
        sizes = (page_size, num_kv_heads, half, triton.next_power_of_2(num_kv_heads), triton.next_power_of_2(2 * half))
        with torch.cuda.device_of(pages):
            moves[(num_tokens, num_layers)](pages, src, dst, shift, inv_freq, pages.stride(0), pages.stride(1), *sizes)
        return
    block = triton.next_power_of_2(half)
    launch: Any = _move_kv
    with torch.cuda.device_of(pages):
        launch[(triton.cdiv(num_tokens, MOVED), num_layers)](
            pages, src, dst, shift, inv_freq, num_tokens, pages.stride(0), pages.stride(1), page_size, num_kv_heads, half, block, MOVED
        )


def last_page_lens(out: Int32[Tensor, "B"], seq_lens: Int32[Tensor, "B"], kv_indptr: Int32[Tensor, "B+1"], page_size: int) -> None:
    """Compute `out = seq_lens - (pages of the row - 1) * page_size`; at most 0 if a row has not reached its last planned page yet."""
    num_rows = out.shape[0]
    launch: Any = _last_page_lens
    with torch.cuda.device_of(out):
        launch[(triton.cdiv(num_rows, 1024),)](out, seq_lens, kv_indptr, page_size, num_rows, 1024, num_warps=8)
