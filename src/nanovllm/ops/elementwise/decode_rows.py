"""Small operations of a decode batch, each in one launch instead of a dozen: rotary angles, next positions, soft caps."""

import torch

from nanovllm.ops.backends import HALVES, installed
from nanovllm.ops.elementwise.norm_rope import soft_cap
from nanovllm.types import Float, Float32, Int32, Int64, Tensor

_LIBRARY = torch.library.Library("nanovllm", "FRAGMENT")
_LIBRARY.define("rotary_angles(Tensor positions, Tensor inv_freq, float factor) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.define(
    "next_places(Tensor positions, Tensor seq_lens, Tensor page_tables, Tensor active, SymInt num_pages, SymInt page_size) "
    "-> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define("capped_logits(Tensor logits, float cap) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def rotary_angles(
    positions: Int32[Tensor, "T"] | Int64[Tensor, "T"], inv_freq: Float32[Tensor, "half"], factor: float
) -> tuple[Float32[Tensor, "T 1 D"], Float32[Tensor, "T 1 D"]]:
    """Return cosines, and sines with the first half negated, of `positions[t] * inv_freq`, times `factor`.

    Both are repeated along the last axis, for the two channels of each pair. A pair of channels with speed 0 is not rotated, and `factor`
    does not apply to it.
    """
    return torch.ops.nanovllm.rotary_angles.default(positions, inv_freq, factor)


def next_places(
    positions: Int32[Tensor, "B"],
    seq_lens: Int32[Tensor, "B"],
    page_tables: Int32[Tensor, "B P"],
    active: Int32[Tensor, "B"],
    num_pages: int,
    page_size: int,
) -> tuple[Int32[Tensor, "B"], Int32[Tensor, "B"], Int32[Tensor, "B"]]:
    """Return positions, slots and lengths of the next step, for rows that advance by `active` tokens (1, or 0 for padding).

    A token after the end of a row's page table gets a slot in the dummy page, `num_pages - 1`. The row's length then stays at the number
    of tokens that the page table has room for.
    """
    return torch.ops.nanovllm.next_places.default(positions, seq_lens, page_tables, active, num_pages, page_size)


def capped_logits(logits: Float[Tensor, "R V"], cap: float) -> Float[Tensor, "R V"]:
    """Compute `soft_cap` in one launch on a GPU; 0.0 returns the logits unchanged."""
    return torch.ops.nanovllm.capped_logits.default(logits, cap) if cap else logits


@torch.library.register_fake("nanovllm::rotary_angles", lib=_LIBRARY)
def _fake_angles(positions: Tensor, inv_freq: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    shape = (positions.shape[0], 1, 2 * inv_freq.shape[0])
    return inv_freq.new_empty(shape), inv_freq.new_empty(shape)


@torch.library.register_fake("nanovllm::capped_logits", lib=_LIBRARY)
def _fake_capped(logits: Tensor, cap: float) -> Tensor:
    return logits.new_empty(logits.shape)


@torch.library.register_fake("nanovllm::next_places", lib=_LIBRARY)
def _fake_places(positions, seq_lens, page_tables, active, num_pages, page_size):
    return tuple(torch.empty_like(positions) for _ in range(3))


def angles(positions: Tensor, inv_freq: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Compute `rotary_angles` in plain torch, which `torch.func` can transform."""
    turned = positions.to(torch.float32)[:, None, None] * inv_freq
    factors = 1.0 if factor == 1.0 else torch.full_like(inv_freq, factor).masked_fill(inv_freq == 0, 1.0)
    cos, sin = turned.cos() * factors, turned.sin() * factors
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def _places(
    positions: Tensor, seq_lens: Tensor, page_tables: Tensor, active: Tensor, num_pages: int, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    index = seq_lens - 1 + active
    column, width = index // page_size, page_tables.shape[1]
    page = page_tables.gather(1, column.clamp(max=width - 1).long().unsqueeze(1)).squeeze(1)
    page = torch.where(column < width, page, num_pages - 1)
    return positions + active, page * page_size + index % page_size, (seq_lens + active).clamp(max=width * page_size)


def _cuda_angles(positions: Tensor, inv_freq: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    if not installed("triton"):
        return angles(positions, inv_freq, factor)
    from nanovllm.ops.elementwise import triton_decode_rows

    return triton_decode_rows.rotary_angles(positions.contiguous(), inv_freq.contiguous(), factor)


def _cuda_places(
    positions: Tensor, seq_lens: Tensor, page_tables: Tensor, active: Tensor, num_pages: int, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    if not installed("triton"):
        return _places(positions, seq_lens, page_tables, active, num_pages, page_size)
    from nanovllm.ops.elementwise import triton_decode_rows

    given = (positions.contiguous(), seq_lens.contiguous(), page_tables, active.contiguous())
    return triton_decode_rows.next_places(*given, num_pages, page_size)


def _cuda_capped(logits: Tensor, cap: float) -> Tensor:
    if logits.dtype not in HALVES or not installed("triton"):
        return soft_cap(logits, cap)
    from nanovllm.ops.elementwise import triton_decode_rows

    return triton_decode_rows.capped_logits(logits.contiguous(), cap)


_LIBRARY.impl("capped_logits", soft_cap, "CPU")
_LIBRARY.impl("capped_logits", _cuda_capped, "CUDA")
_LIBRARY.impl("rotary_angles", angles, "CPU")
_LIBRARY.impl("rotary_angles", _cuda_angles, "CUDA")
_LIBRARY.impl("next_places", _places, "CPU")
_LIBRARY.impl("next_places", _cuda_places, "CUDA")
