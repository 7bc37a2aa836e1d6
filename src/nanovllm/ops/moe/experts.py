"""`experts`: the feed-forward layer of a mixture of experts; each token runs through the few experts that a router chose."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from nanovllm.errors import NanoVLLMError
from nanovllm.ops.backends import dependent_launch, own_kernels, shared_memory
from nanovllm.ops.elementwise.norm_rope import ACTS
from nanovllm.ops.linear.linear import linear
from nanovllm.ops.linear.padded import ROWS
from nanovllm.ops.linear.tiles import Tile, WideTile
from nanovllm.ops.moe.tiles import FewTiles, GroupedTiles
from nanovllm.types import Float, Int32, Int64, Tensor

PIECE = 256  # inputs of one output that a warp reads in one load: 16 bytes per thread
LOADS = 32  # weight loads in flight per thread, if at most 8 warps per output are enough
MOST_LOADS = 64  # upper limit: the loop over the loads is unrolled
ALONE = 1 << 14  # torch gives an elementwise operation on so few numbers to one thread
_LIBRARY = torch.library.Library("nanovllm", "FRAGMENT")


_LIBRARY.define(
    "experts(Tensor x, Tensor gate_up, Tensor down, Tensor chosen, Tensor weights, str act, Tensor? residual=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


class ExpertsMismatchError(NanoVLLMError):
    """`experts` got tensors that do not fit together, the number of an expert that does not exist, or an unknown activation."""


def experts(
    x: Float[Tensor, "T M"],
    gate_up: Float[Tensor, "E F2 M"],
    down: Float[Tensor, "E M F"],
    chosen: Int64[Tensor, "T k"] | Int32[Tensor, "T k"],
    weights: Float[Tensor, "T k"],
    act: str = "silu",
    residual: Float[Tensor, "T M"] | None = None,
) -> Float[Tensor, "T M"]:
    """Run each token through its chosen experts and return the weighted sum, plus a residual if given.

    Row t of the result is the sum over j of `weights[t, j] * down[e] @ (act(gate) * up)`. Here `e = chosen[t, j]`, and `gate` and `up`
    are the halves of `gate_up[e] @ x[t]`. Nothing is written in place.

    Schema: `nanovllm::experts(Tensor x, Tensor gate_up, Tensor down, Tensor chosen, Tensor weights, str act, Tensor? residual) -> Tensor`.
    The reference is a loop over the chosen experts in plain torch.

    Rounding: gate, up, activation and their product are rounded to the dtype of `x`, as the plain functions round. Each expert's output
    is rounded too, except in the GPU kernels for few tokens. The weighted sum is made in float32 (in float64 for float64 inputs) and
    rounded once. The residual is added to the rounded sum.

    On a CPU each row is summed in ascending order of experts. Its bits do not depend on the other rows if the bits of `linear` do not.
    On a GPU the host never waits, and the launches depend on shapes only, so one captured call serves any routing. Few tokens take two
    launches, many tokens four. A slow loop over all experts runs in float32 and float64, without Triton, and if weights are not
    contiguous.

    Args:
        x: Inputs, `[T, M]`.
        gate_up: Gate and up projections of each expert, stacked along axis 1, `[E, 2 F, M]`, in the dtype of `x`.
        down: Down projections, `[E, M, F]`, in the dtype of `x`.
        chosen: Numbers of the chosen experts, int32 or int64 `[T, k]`. The experts of one token are distinct.
        weights: Weights of the chosen experts, `[T, k]`. Their dtype may be wider than that of `x`.
        act: The activation: `"silu"`, `"gelu"` or `"gelu_tanh"`.
        residual: Added to the sums, `[T, M]`, in the dtype of `x`. None: nothing is added.

    Returns:
        The weighted sums, `[T, M]`, in the dtype of `x`.

    Raises:
        ExpertsMismatchError: Shapes or dtypes do not fit together, `act` is unknown, or, on a CPU, an expert is outside 0 ... E - 1.
            On a GPU the result for such an expert is undefined.

    Examples:
        >>> from nanovllm.ops import experts
        >>> x, gate_up, down = torch.ones(1, 2), torch.ones(3, 2, 2), torch.ones(3, 2, 1)
        >>> y = experts(x, gate_up, down, torch.tensor([[2, 0]]), torch.tensor([[0.75, 0.25]]))
        >>> [round(value, 3) for value in y[0].tolist()]  # silu(2) * 2, twice
        [3.523, 3.523]
    """
    require_fit(x, gate_up.shape, down.shape, chosen, weights, act, residual)
    if not x.dtype == gate_up.dtype == down.dtype:
        raise ExpertsMismatchError(f"x, gate_up and down must have one dtype, got {x.dtype}, {gate_up.dtype} and {down.dtype}")
    return torch.ops.nanovllm.experts.default(x, gate_up, down, chosen, weights, act, residual)


def require_fit(
    x: Tensor, gate_up: torch.Size, down: torch.Size, chosen: Tensor, weights: Tensor, act: str, residual: Tensor | None = None
) -> None:
    """Raise `ExpertsMismatchError` if tensors do not fit together. `gate_up` and `down` are the shapes of the matrices."""
    if act not in ACTS:
        raise ExpertsMismatchError(f"activation {act!r} is not one of {', '.join(ACTS)}")
    dims = (x.dim(), len(gate_up), len(down), chosen.dim(), weights.dim())
    if dims != (2, 3, 3, 2, 2):
        raise ExpertsMismatchError(f"x, gate_up, down, chosen and weights need 2, 3, 3, 2 and 2 axes, got {', '.join(map(str, dims))}")
    (num, outputs, inner), (tokens, width) = down, x.shape
    if outputs != width or tuple(gate_up) != (num, 2 * inner, width):
        raise ExpertsMismatchError(
            f"x {tuple(x.shape)}, gate_up {tuple(gate_up)} and down {tuple(down)} are not [T, M], [E, 2 F, M] and [E, M, F]"
        )
    if chosen.shape[0] != tokens or weights.shape[0] != tokens or chosen.shape[1] != weights.shape[1] or not 1 <= chosen.shape[1] <= num:
        raise ExpertsMismatchError(
            f"chosen {tuple(chosen.shape)} and weights {tuple(weights.shape)} are not both [T, k] of {tokens} tokens and {num} experts"
        )
    if chosen.dtype not in (torch.int32, torch.int64) or not weights.dtype.is_floating_point:
        raise ExpertsMismatchError(f"chosen must be int32 or int64 and weights floating-point, got {chosen.dtype} and {weights.dtype}")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ExpertsMismatchError(
            f"residual {tuple(residual.shape)} of {residual.dtype} is not as x, which is {tuple(x.shape)} of {x.dtype}"
        )


def require_experts(hit: list[int], num: int) -> None:
    """Raise `ExpertsMismatchError` unless the numbers of chosen experts, ascending, are in 0 ... `num` - 1."""
    if hit and not 0 <= hit[0] <= hit[-1] < num:
        raise ExpertsMismatchError(f"experts {hit[0]} ... {hit[-1]} were chosen, but valid numbers are 0 ... {num - 1}")


@torch.library.register_fake("nanovllm::experts", lib=_LIBRARY)
def _fake(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor, act: str, residual: Tensor | None = None) -> Tensor:
    return x.new_empty(x.shape)


def plus(y: Tensor, residual: Tensor | None) -> Tensor:
    """`y` plus the residual, if there is one."""
    return y if residual is None else y + residual


def _reference(
    x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor, act: str, residual: Tensor | None = None
) -> Tensor:
    hit = chosen.unique().tolist()  # ascending, which is the order of every row's sum
    require_experts(hit, down.shape[0])
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.new_zeros(x.shape, dtype=wide)
    for e in hit:
        rows, places = torch.where(chosen == e)
        gate, up = linear(F.pad(x[rows], (0, 0, 0, -len(rows) % ROWS)), gate_up[e]).chunk(2, -1)
        y = linear(_by_pieces(ACTS[act], gate) * up, down[e])[: len(rows)]
        total.index_add_(0, rows, y.to(wide) * weights[rows, places, None].to(wide))
    return plus(total.to(x.dtype), residual)


def _by_pieces(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply an elementwise function in pieces that torch gives to one thread each.

    If `x` has a multiple of 128 numbers, each piece fills whole vector registers. Numbers at the end of a partly filled piece would be
    rounded in another way.
    """
    return torch.cat([function(piece) for piece in x.contiguous().view(-1).split(ALONE)]).view_as(x)


def every_expert(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor, act: str) -> Tensor:
    """Compute `experts` by running all rows through every expert.

    This is slow, but no shape depends on the routing. So the host does not wait for the device, and `torch.func` can transform it.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.new_zeros(x.shape, dtype=wide)
    for e in range(down.shape[0]):
        mine = chosen == e
        share = torch.where(mine, weights.to(wide), 0).sum(1, keepdim=True)
        gate, up = F.linear(x, gate_up[e]).chunk(2, -1)
        # A mask, not a product with a share of 0: an expert's result for a row of another expert may be infinite.
        total += torch.where(mine.any(1, keepdim=True), F.linear(ACTS[act](gate) * up, down[e]).to(wide) * share, 0)
    return total.to(x.dtype)


def _cuda(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor, act: str, residual: Tensor | None = None) -> Tensor:
    if x.shape[0] == 0:
        return x.new_empty(x.shape)
    if not (gate_up.is_contiguous() and down.is_contiguous() and own_kernels(x.device, x.dtype)):
        return plus(every_expert(x, gate_up, down, chosen, weights, act), residual)
    from nanovllm.ops.moe import triton_experts

    (tokens, k), (num, width, inner) = chosen.shape, down.shape
    tiles = tiles_of(tokens, k, num, width, inner, shared_memory(x.device))
    given = (x.contiguous(), gate_up, down, chosen.contiguous(), weights.contiguous(), act)
    return triton_experts.launch(*given, tiles, dependent_launch(x.device), None if residual is None else residual.contiguous())


def tiles_of(tokens: int, k: int, num: int, width: int, inner: int, memory: int) -> FewTiles | GroupedTiles:
    """Choose the tile configuration for a number of tokens.

    With `FewTiles` each pair of a token and an expert reads its expert's weights by itself. If another pair reads the same weights at
    the same time, they come from L2. This is faster while few pairs share an expert. With half as many pairs as experts about a fifth do.

    Args:
        tokens: Number of tokens.
        k: Experts per token.
        num: Number of experts.
        width: Inputs and outputs of an expert, M.
        inner: Neurons of an expert, F.
        memory: Shared memory that one program may use, in bytes.
    """
    gate_up, down = _few_tile(2 * width), _few_tile(k * inner)
    if gate_up is not None and down is not None and (tokens == 1 or 2 * tokens * k <= num):
        return FewTiles(gate_up=gate_up, down=down)
    return _grouped_tiles(tokens * k / num, memory)


def _few_tile(numbers: int) -> Tile | None:
    """Return a tile configuration in which as few warps as possible share the `numbers` weights of an output; None if 8 are too few."""
    for each in (1, 2, 4, 8):
        if numbers <= (MOST_LOADS if each == 8 else LOADS) * PIECE * each:
            return Tile(outputs=max(1, 2 // each), warps=max(2, each), depth=PIECE * each)
    return None


def _grouped_tiles(pairs: float, memory: int) -> GroupedTiles:
    """Choose blocks that hold all pairs of most experts, given the average number of pairs per expert. Many pairs get large tiles."""
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
