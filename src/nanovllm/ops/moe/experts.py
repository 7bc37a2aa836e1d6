"""`experts`: the feed-forward of a mixture of experts, each token through the few that a router chose for it."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from nanovllm.errors import NanoVLLMError
from nanovllm.ops.backends import dependent_launch, own_kernels, shared_memory
from nanovllm.ops.elementwise.norm_rope import ACTS
from nanovllm.ops.linear.linear import ROWS, linear
from nanovllm.ops.linear.tiles import Tile, WideTile
from nanovllm.ops.moe.tiles import FewTiles, GroupedTiles
from nanovllm.types import Float, Int32, Int64, Tensor

PIECE = 256  # inputs of one output that a warp reads in one load, 16 bytes a thread
LOADS = 32  # of weights that a thread has in flight, where 8 warps or fewer an output are enough
MOST_LOADS = 64  # the loop over them is unrolled
ALONE = 1 << 14  # numbers of which torch gives no part to another thread
_LIBRARY = torch.library.Library("nanovllm", "FRAGMENT")


_LIBRARY.define(
    "experts(Tensor x, Tensor gate_up, Tensor down, Tensor chosen, Tensor weights, str act) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)


class ExpertsMismatchError(NanoVLLMError):
    """`experts` was given tensors that do not fit together, an expert that there is not, or an unknown activation."""


def experts(
    x: Float[Tensor, "T M"],
    gate_up: Float[Tensor, "E F2 M"],
    down: Float[Tensor, "E M F"],
    chosen: Int64[Tensor, "T k"] | Int32[Tensor, "T k"],
    weights: Float[Tensor, "T k"],
    act: str = "silu",
) -> Float[Tensor, "T M"]:
    """The sum over j of `weights[t, j] * down[e] @ (act(gate) * up)` with `e = chosen[t, j]`, `gate, up = gate_up[e] @ x[t]`.

    `gate_up` holds a gate and an up projection, stacked along axis 1, F2 = 2 F. A token's experts are distinct; `act` is one of `ACTS`.
    `weights` may have a wider dtype than x. Gate, up, activation and their product are rounded to x's dtype, as plain functions round;
    the weighted sum is made in float32 (float64 stays) and rounded once. A GPU's kernels for few tokens do not round before it.

    On a CPU a row is summed in ascending order of experts, and its bits do not depend on the other rows where `linear`'s do not.
    On a GPU nothing waits for the device and launches depend on shapes alone, so a captured call serves any routing. Two launches for few
    tokens, four for many; in float32, float64, without Triton or with weights that are not contiguous a loop over all experts, slow.

    Raises `ExpertsMismatchError`; for an expert outside 0 ... E - 1 on a CPU alone, on a GPU that is undefined.
    """
    _require_fit(x, gate_up, down, chosen, weights, act)
    return torch.ops.nanovllm.experts.default(x, gate_up, down, chosen, weights, act)


def _require_fit(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor, act: str) -> None:
    if act not in ACTS:
        raise ExpertsMismatchError(f"activation {act!r} is not one of {', '.join(ACTS)}")
    dims = (x.dim(), gate_up.dim(), down.dim(), chosen.dim(), weights.dim())
    if dims != (2, 3, 3, 2, 2):
        raise ExpertsMismatchError(f"x, gate_up, down, chosen and weights have 2, 3, 3, 2 and 2 axes, got {', '.join(map(str, dims))}")
    (num, outputs, inner), (tokens, width) = down.shape, x.shape
    if outputs != width or gate_up.shape[0] != num or gate_up.shape[1] != 2 * inner or gate_up.shape[2] != width:
        raise ExpertsMismatchError(
            f"x {tuple(x.shape)}, gate_up {tuple(gate_up.shape)} and down {tuple(down.shape)} are not [T, M], [E, 2 F, M] and [E, M, F]"
        )
    if chosen.shape[0] != tokens or weights.shape[0] != tokens or chosen.shape[1] != weights.shape[1] or not 1 <= chosen.shape[1] <= num:
        raise ExpertsMismatchError(
            f"chosen {tuple(chosen.shape)} and weights {tuple(weights.shape)} are not both [T, k] of {tokens} tokens and {num} experts"
        )
    if not x.dtype == gate_up.dtype == down.dtype:
        raise ExpertsMismatchError(f"x, gate_up and down are of one dtype, got {x.dtype}, {gate_up.dtype} and {down.dtype}")
    if chosen.dtype not in (torch.int32, torch.int64) or not weights.dtype.is_floating_point:
        raise ExpertsMismatchError(f"chosen is int32 or int64 and weights are floats, got {chosen.dtype} and {weights.dtype}")


@torch.library.register_fake("nanovllm::experts", lib=_LIBRARY)
def _fake(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor, act: str) -> Tensor:
    return x.new_empty(x.shape)


def _reference(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor, act: str) -> Tensor:
    hit = chosen.unique().tolist()  # ascending: the order of every row's sum
    if hit and not 0 <= hit[0] <= hit[-1] < down.shape[0]:
        raise ExpertsMismatchError(f"experts {hit[0]} ... {hit[-1]} were chosen, there are 0 ... {down.shape[0] - 1}")
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.new_zeros(x.shape, dtype=wide)
    for e in hit:
        rows, places = torch.where(chosen == e)
        gate, up = linear(F.pad(x[rows], (0, 0, 0, -len(rows) % ROWS)), gate_up[e]).chunk(2, -1)
        y = linear(_by_pieces(ACTS[act], gate) * up, down[e])[: len(rows)]
        total.index_add_(0, rows, y.to(wide) * weights[rows, places, None].to(wide))
    return total.to(x.dtype)


def _by_pieces(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Of numbers in pieces that one thread takes alone, and that are whole vectors of its instructions where x has a multiple of 128: the
    last few of another piece would be rounded in another way."""
    return torch.cat([function(piece) for piece in x.contiguous().view(-1).split(ALONE)]).view_as(x)


def _dense(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor, act: str) -> Tensor:
    """All rows through every expert: slow, but no shape depends on what was chosen, so the host need not wait for it."""
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.new_zeros(x.shape, dtype=wide)
    for e in range(down.shape[0]):
        mine = chosen == e
        share = torch.where(mine, weights.to(wide), 0).sum(1, keepdim=True)
        gate, up = linear(x, gate_up[e]).chunk(2, -1)
        # not a product with a share of 0: what an expert makes of a row that is not its own may be infinite
        total += torch.where(mine.any(1, keepdim=True), linear(ACTS[act](gate) * up, down[e]).to(wide) * share, 0)
    return total.to(x.dtype)


def _cuda(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor, act: str) -> Tensor:
    if x.shape[0] == 0:
        return x.new_empty(x.shape)
    if not (gate_up.is_contiguous() and down.is_contiguous() and own_kernels(x.device, x.dtype)):
        return _dense(x, gate_up, down, chosen, weights, act)
    from nanovllm.ops.moe import triton_experts

    (tokens, k), (num, width, inner) = chosen.shape, down.shape
    tiles = tiles_of(tokens, k, num, width, inner, shared_memory(x.device))
    given = (x.contiguous(), gate_up, down, chosen.contiguous(), weights.contiguous(), act)
    return triton_experts.launch(*given, tiles, dependent_launch(x.device))


def tiles_of(tokens: int, k: int, num: int, width: int, inner: int, memory: int) -> FewTiles | GroupedTiles:
    """How `tokens` of `width` inputs through k of `num` experts of `inner` neurons each are cut; `memory` bounds a program's.

    A pair by itself reads its expert's weights, from L2 where another pair reads them at the same time. That pays while few pairs meet:
    of half as many pairs as experts a fifth or so do.
    """
    gate_up, down = _few_tile(2 * width), _few_tile(k * inner)
    if gate_up is not None and down is not None and (tokens == 1 or 2 * tokens * k <= num):
        return FewTiles(gate_up=gate_up, down=down)
    return _grouped_tiles(tokens * k / num, memory)


def _few_tile(numbers: int) -> Tile | None:
    """Programs of two warps or more, of which as few share an output's `numbers` weights as can hold them; None where 8 cannot."""
    for each in (1, 2, 4, 8):
        if numbers <= (MOST_LOADS if each == 8 else LOADS) * PIECE * each:
            return Tile(outputs=max(1, 2 // each), warps=max(2, each), depth=PIECE * each)
    return None


def _grouped_tiles(pairs: float, memory: int) -> GroupedTiles:
    """By the pairs of an expert, on average: blocks that hold most experts' pairs, and where these are many, large tiles."""
    rows = 16 if pairs <= 8 else 32 if pairs <= 24 else 64 if pairs <= 96 else 128
    while True:
        columns, stages, warps = (64, 5, 4) if rows <= 32 else (128, 4, 4) if rows == 64 else (256, 3, 8)
        stages = min(stages, memory // (2 * 64 * (rows + columns)))
        if stages >= 2 or rows == 16:
            break
        rows //= 2
    down = WideTile(outputs=columns, rows=rows, depth=64, stages=max(1, stages), warps=warps)
    return GroupedTiles(gate_up=replace(down, outputs=columns // 2), down=down)


_LIBRARY.impl("experts", _reference, "CPU")
_LIBRARY.impl("experts", _cuda, "CUDA")
