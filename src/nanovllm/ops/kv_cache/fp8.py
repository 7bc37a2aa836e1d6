"""KV pages in FP8 (e4m3): their layout, and how keys and values become codes with a scale and numbers again.

A number is `code * scale`. Each token has one float32 scale for each key head and one for each value head: the largest absolute value of
the head divided by 448, the largest code. Nothing else enters a scale, so a token's KV does not depend on other tokens, nor on the batch.

**Layout.** A pool has the dtype `float8_e4m3fn` and the shape `[L, N, 2, K, S, D + 4]`. The last two axes are one block of bytes: first the
codes of the page's tokens, `[S, D]`, then their scales, `[S]` in float32. So codes of a token are as aligned as in other dtypes, and pages
are still whole slices of the pool, which `copy_pages` copies as bytes. Only `split` and the Triton kernels know the block. A *row* of a
token, as in chunk files, is `[D + 4]`: its codes, then the four bytes of its scale.
"""

import torch

from nanovllm.types import Float, Float32, Int32, Tensor

FP8 = torch.float8_e4m3fn
SCALE_BYTES = 4  # of a head's scale in float32
LARGEST = 448.0  # the largest code of e4m3
PER_LARGEST = 1 / LARGEST  # a factor, because torch divides by a number in different ways on a CPU and on a GPU
LEAST = 2.0**-126  # the smallest scale, a normal number: zeros have it, so that no division gives NaN
MOST = torch.finfo(torch.float32).max  # infinities become it


def in_fp8(pages: Tensor) -> bool:
    """Return whether pages are in FP8, so that the last axis has scales too."""
    return pages.dtype == FP8


def as_bytes(pages: Tensor) -> Tensor:
    """Return pages in a dtype that torch copies and indexes on all devices: those in FP8 as bytes, others as they are."""
    return pages.view(torch.uint8) if pages.dtype == FP8 else pages


def stored_width(head_dim: int, dtype: torch.dtype) -> int:
    """Return the size of a pool's last axis.

    Examples:
        >>> stored_width(128, torch.bfloat16), stored_width(128, torch.float8_e4m3fn)
        (128, 132)
    """
    return head_dim + SCALE_BYTES if dtype == FP8 else head_dim


def head_dim_of(pages: Float[Tensor, "... W"]) -> int:
    """Return the number of channels of a head in a pool, or in one layer of it."""
    return pages.shape[-1] - SCALE_BYTES if pages.dtype == FP8 else pages.shape[-1]


def quantised(x: Float[Tensor, "*axes D"]) -> tuple[Float[Tensor, "*axes D"], Float32[Tensor, "*axes 1"]]:
    """Return the codes of heads, and the scale of each head.

    NaN becomes 0, and infinities become the largest numbers of float32. Codes are rounded to the nearest, ties to even, up to 448.

    Examples:
        >>> codes, scale = quantised(torch.tensor([0.0, -1.0, 7.0]))
        >>> codes.float().tolist(), scale.tolist()
        ([0.0, -64.0, 448.0], [0.015625])
    """
    wide = x.to(torch.float32).nan_to_num(0.0, MOST, -MOST)
    scale = (wide.abs().amax(-1, keepdim=True) * PER_LARGEST).clamp(min=LEAST)
    return (wide / scale).clamp(-LARGEST, LARGEST).to(FP8), scale


def split(pages: Float[Tensor, "*axes S W"]) -> tuple[Float[Tensor, "*axes S D"], Float32[Tensor, "*axes S 1"]]:
    """Return the codes and the scales of FP8 pages, as views of their memory."""
    size, head_dim = pages.shape[-2], head_dim_of(pages)
    block = pages.flatten(-2)
    codes = block[..., : size * head_dim].unflatten(-1, (size, head_dim))
    return codes, block[..., size * head_dim :].view(torch.float32).unsqueeze(-1)


def numbers(pages: Float[Tensor, "*axes S W"]) -> Float[Tensor, "*axes S D"]:
    """Return the numbers in pages: the pages themselves, or float32 for pages in FP8."""
    if pages.dtype != FP8:
        return pages
    codes, scales = split(pages)
    return codes.to(torch.float32) * scales


def chosen(pages: Float[Tensor, "N 2 K S W"], index: Int32[Tensor, "*index"]) -> Float[Tensor, "*index 2 K S W"]:
    """Return copies of pages."""
    return as_bytes(pages)[index].view(pages.dtype)


def write_tokens(
    pages: Float[Tensor, "N 2 K S W"], codes: Float[Tensor, "T 2 K D"], scales: Float32[Tensor, "T 2 K 1"], slots: Int32[Tensor, "T"]
) -> None:
    """Donates `pages`, one layer in FP8: write the codes and scales of tokens into their slots."""
    (at_codes, at_scales), page_size = split(pages), pages.shape[3]
    page, inside = slots // page_size, slots % page_size
    at_codes.view(torch.uint8).permute(0, 3, 1, 2, 4)[page, inside] = codes.view(torch.uint8)
    at_scales.permute(0, 3, 1, 2, 4)[page, inside] = scales


def read_tokens(
    pages: Float[Tensor, "N 2 K S W"], slots: Int32[Tensor, "T"]
) -> tuple[Float[Tensor, "T 2 K D"], Float32[Tensor, "T 2 K 1"]]:
    """Return copies of the codes and scales of tokens in one layer in FP8."""
    (codes, scales), page_size = split(pages), pages.shape[3]
    page, inside = slots // page_size, slots % page_size
    at_codes, at_scales = (part.permute(0, 3, 1, 2, 4)[page, inside] for part in (codes.view(torch.uint8), scales))
    return at_codes.view(FP8), at_scales


def as_rows(pages: Float[Tensor, "n 2 K S W"]) -> Float[Tensor, "n S 2 K W"]:
    """Return the rows of all tokens of FP8 pages, in new memory."""
    codes, scales = split(pages)
    rows = torch.cat((codes.view(torch.uint8), scales.view(torch.uint8)), -1)
    return rows.permute(0, 3, 1, 2, 4).contiguous().view(FP8)


def write_rows(pages: Float[Tensor, "N 2 K S W"], rows: Float[Tensor, "T 2 K W"], slots: Int32[Tensor, "T"]) -> None:
    """Donates `pages`, one layer in FP8: write rows of tokens, as `as_rows` returns them, into their slots."""
    head_dim = head_dim_of(pages)
    scales = rows[..., head_dim:].contiguous().view(torch.float32)
    write_tokens(pages, rows[..., :head_dim].contiguous(), scales, slots)
