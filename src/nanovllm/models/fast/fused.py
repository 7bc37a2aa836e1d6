"""Steps on a GPU as few fused kernels, each of which starts while the kernel before it still runs.

A layer takes five kernels for few tokens, or seven if norms come after attention and MLP, or if it has experts. For many tokens it takes
seven or nine, and with experts up to twelve.
The results agree with a model's own `forward` within rounding, for every architecture whose layers are `params.Layer`.
"""

from collections.abc import Callable, Generator, Sequence
from itertools import pairwise
from typing import Any, TypeVar, overload

from nanovllm.config import Mesh, ModelConfig
from nanovllm.models.common import decoder, layers
from nanovllm.models.common.batch import Batch
from nanovllm.models.common.hidden import require_layer
from nanovllm.models.common.params import Layer, Params
from nanovllm.models.fast.choice import FastChoice, LayerFunction, beyond, by_layer
from nanovllm.models.fast.cuts import DEFAULT, Cuts, StepCuts, with_cuts
from nanovllm.ops.attention.paged_prefill import paged_prefill
from nanovllm.ops.attention.rope_attend import rope_attend, rope_write
from nanovllm.ops.backends import on_hopper, own_kernels
from nanovllm.ops.cuts import Cut
from nanovllm.ops.distributed.collectives import (
    all_reduce,
    all_reduce_add,
    all_reduce_add_norm,
    begin_all_reduce,
    begin_all_reduce_add_norm,
)
from nanovllm.ops.elementwise.decode_rows import capped_logits
from nanovllm.ops.linear import norm_linear as few
from nanovllm.ops.linear.linear import linear
from nanovllm.ops.linear.linear_add_norm import linear_add_norm, norm_add, product_in_parts
from nanovllm.ops.linear.norm_linear import norm_linear
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.ops.linear.quantised_tiles import serves_closely
from nanovllm.ops.moe.quantised_experts import any_experts
from nanovllm.ops.moe.route import norm_route, route
from nanovllm.state.kv_cache import KVState
from nanovllm.types import Float, Float32, Int32, Tensor

R = TypeVar("R")
Steps = Generator[None, None, R]  # of a computation that stops where others may run, and returns an R in the end
Wait = Callable[[], R]


def serves(params: Params[Tensor], config: ModelConfig) -> bool:
    """Whether the kernels can run this model."""
    return not unknown(params, config) and own_kernels(params.embed.device, params.embed.dtype)


def unknown(params: Params[Any], config: ModelConfig) -> str:
    """The feature of a model that the kernels do not support; empty if they support all."""
    if known := beyond(params, config):
        return known
    if any(w.experts is not None and _quantised(w.experts.gate_up) != _quantised(w.experts.down) for w in params.layers):
        return "experts of which only one matrix is quantised"
    if any(w.gate_up_bias is not None for w in params.layers):
        return "biases of gates"
    return "norms after experts" if any(w.experts is not None and w.down_norm is not None for w in params.layers) else ""


def follows_closely(params: Params[Tensor], num_tokens: int) -> bool:
    """Whether `decode_layer` runs a step of `num_tokens` tokens. Otherwise `wide_layer` does."""
    return _few(params.layers[0], params.embed, num_tokens)


def _few(w: Layer[Tensor], like: Tensor, num_tokens: int) -> bool:
    if num_tokens > few.FEW and (w.o_norm is not None or w.down_norm is not None):
        return False  # a product with neither norm nor residual would use the kernel for many rows
    shapes = ((w.qkv, False), (w.o, False), (w.gate_up, True), (w.down, False))
    alike = w.input_norm.dtype == like.dtype
    return all(_serves_few(matrix, gated, like, num_tokens, alike) for matrix, gated in shapes if matrix is not None)


def _serves_few(matrix: Tensor | QuantisedMatrix, gated: bool, like: Tensor, num_tokens: int, alike: bool) -> bool:
    """Whether a kernel that computes the norm, too, multiplies so many tokens. `alike`: norm weights have the dtype of the model."""
    if isinstance(matrix, QuantisedMatrix):
        hopper = alike and on_hopper(like.device, like.dtype)
        return serves_closely(matrix, num_tokens, gated, hopper=hopper) and own_kernels(like.device, like.dtype)
    return few.serves(like.device, like.dtype, num_tokens, matrix.shape[1], gated)


def _quantised(matrix: Any) -> bool:
    return isinstance(matrix, QuantisedMatrix)


@overload
def forward(
    params: Params[Tensor],
    kv: KVState,
    batch: Batch,
    config: ModelConfig,
    *,
    plain: LayerFunction | None = None,
    choice: FastChoice | None = None,
    cuts: Cuts | None = None,
    capture_hidden: None = None,
) -> tuple[Float[Tensor, "R V"], KVState]: ...


@overload
def forward(
    params: Params[Tensor],
    kv: KVState,
    batch: Batch,
    config: ModelConfig,
    *,
    plain: LayerFunction | None = None,
    choice: FastChoice | None = None,
    cuts: Cuts | None = None,
    capture_hidden: Sequence[int],
) -> tuple[Float[Tensor, "R V"], KVState, tuple[Float[Tensor, "_T M"], ...]]: ...


def forward(
    params: Params[Tensor],
    kv: KVState,
    batch: Batch,
    config: ModelConfig,
    *,
    plain: LayerFunction | None = None,
    choice: FastChoice | None = None,
    cuts: Cuts | None = None,
    capture_hidden: Sequence[int] | None = None,
) -> tuple[Float[Tensor, "R V"], KVState] | tuple[Float[Tensor, "R V"], KVState, tuple[Float[Tensor, "_T M"], ...]]:
    """Donates `kv`. Run one step's tokens through the fused kernels, as a model's `forward` does in plain PyTorch.

    Args:
        params: The weights.
        kv: The KV memory. It is overwritten; use the returned value.
        batch: The tokens of the step. `batch.plan` is a plan of `rope_attend`, or of `paged_prefill` for prompts. With `plain` it is a
            plan of `paged_decode`.
        config: The model's config.
        plain: Runs the layers that `choice` leaves out; None if it leaves out none.
        choice: The layers to run in the fused kernels, and whether the head runs in them; None means all.
        cuts: The tile configurations of the kernels; None for the defaults.
        capture_hidden: The layers whose outputs are returned; None: only logits and KV are.

    Returns:
        The logits `[R, V]` and the KV state that holds the new keys and values. With `capture_hidden`, also the outputs `[T, M]` of these
        layers, in their order.

    Raises:
        InvalidRequestError: A layer of `capture_hidden` is not in 0 ... `num_layers` - 1.
    """
    asked = () if capture_hidden is None else capture_hidden
    for each in asked:
        require_layer("capture_hidden", each, len(params.layers))
    # The kernels read the angles before they wait for the kernel before them. The embedding lookup after the angles is an ordinary
    # launch, which waits: so the angles are complete.
    given = layers.given_each(params, batch, config)
    x = layers.embed(params, batch, config)
    eps = config.rms_norm_eps
    fast = (True,) * config.num_layers if choice is None or plain is None else choice.layers
    last = layers.head if choice is not None and not choice.head else None
    here = DEFAULT if cuts is None else cuts.at(x.shape[0])
    captured: dict[int, Tensor] = {}
    if follows_closely(params, x.shape[0]):
        closely = with_cuts(decode_layer, here)
        layer = closely if plain is None else by_layer(closely, plain, fast)
        for at, (w, (pool, index), (cos, sin, view)) in enumerate(zip(params.layers, config.places, given, strict=False)):
            x = layer(w, x, kv.pools[pool], index, cos, sin, view, config)
            if at in asked:
                captured[at] = x
        out = decoder.logits(last or with_cuts(head, cuts), _wanted(x, batch), params, config, cap=capped_logits)
        return (out, kv) if capture_hidden is None else (out, kv, tuple(captured[at] for at in capture_hidden))
    h = norm_add(x, params.layers[0].input_norm, None, eps)
    widely = with_cuts(wide_layer, here)
    gains = (*(w.input_norm for w in params.layers), params.final_norm)
    each = zip(params.layers, pairwise(gains), config.places, given, strict=False)
    for at, (w, (_, gain), (pool, index), (cos, sin, view)) in enumerate(each):
        # The last layer leaves out the tokens whose logits nobody reads, unless its output is asked for.
        ends, pages = at == len(params.layers) - 1 and at not in asked, kv.pools[pool]
        if fast[at] or plain is None:
            x, h = widely(w, x, h, gain, pages, index, cos, sin, view, config, wanted=batch.logit_indices if ends else None)
        else:
            x = plain(w, x, pages, index, cos, sin, view, config)
            x = _wanted(x, batch) if ends else x
            h = norm_add(x, gain, None, eps)
        if at in asked:
            captured[at] = x
    if len(params.layers) - 1 in asked:
        x, h = _wanted(x, batch), _wanted(h, batch)
    if last is not None:
        out = decoder.logits(last, x, params, config, cap=capped_logits)
    else:
        own = linear(h, params.embed if params.head is None else params.head)
        out = capped_logits(decoder.gathered(own, config), config.logit_softcap)
    return (out, kv) if capture_hidden is None else (out, kv, tuple(captured[at] for at in capture_hidden))


def layer(
    w: Layer[Tensor],
    x: Tensor,
    pages: Tensor,
    index: int,
    cos: Tensor,
    sin: Tensor,
    batch: Batch,
    config: ModelConfig,
    *,
    cuts: Cuts | None = None,
) -> Float[Tensor, "T M"]:
    """Donates `pages`. One layer with the signature of a model's `layer`: `decode_layer` for few tokens, `wide_layer` for many."""
    here = DEFAULT if cuts is None else cuts.at(x.shape[0])
    if _few(w, x, x.shape[0]):
        return with_cuts(decode_layer, here)(w, x, pages, index, cos, sin, batch, config)
    h = norm_add(x, w.input_norm, None, config.rms_norm_eps)
    return with_cuts(wide_layer, here)(w, x, h, w.input_norm, pages, index, cos, sin, batch, config)[0]


def decode_layer(
    w: Layer[Tensor],
    x: Float[Tensor, "T M"],
    pages: Float[Tensor, "L N 2 K S W"],
    index: int,
    cos: Float32[Tensor, "T 1 D"],
    sin: Float32[Tensor, "T 1 D"],
    batch: Batch,
    config: ModelConfig,
    *,
    cuts: StepCuts = DEFAULT,
) -> Float[Tensor, "T M"]:
    """Donates `pages`. One decoder layer for few tokens, with the signature of a model's `layer`. Writes k and v into layer `index`."""
    eps = config.rms_norm_eps
    a = _attend(w, norm_linear(x, w.qkv, gain=w.input_norm, bias=w.qkv_bias, eps=eps, cut=cuts.qkv), pages, index, cos, sin, batch, config)
    x = _added(a, w.o, w.o_bias, w.o_norm, x, eps, cuts.o, config.mesh, 0)
    if w.gate_up is None or w.down is None:
        return _experts_added(w, x, config)
    y = 0.0 if w.experts is None else _routed(w, norm_add(x, w.post_norm, None, eps), config)
    h = norm_linear(x, w.gate_up, gain=w.post_norm, eps=eps, gated=True, act=config.hidden_act, cut=cuts.gate_up)
    x = _added(h, w.down, w.down_bias, w.down_norm, x, eps, cuts.down, config.mesh, 1)
    return x if w.experts is None else x + y


def wide_layer(
    w: Layer[Tensor],
    x: Float[Tensor, "T M"],
    h: Float[Tensor, "T M"],
    gain: Float[Tensor, "M"],
    pages: Float[Tensor, "L N 2 K S W"],
    index: int,
    cos: Float32[Tensor, "T 1 D"],
    sin: Float32[Tensor, "T 1 D"],
    batch: Batch,
    config: ModelConfig,
    *,
    wanted: Int32[Tensor, "R"] | None = None,
    cuts: StepCuts = DEFAULT,
) -> tuple[Float[Tensor, "R M"], Float[Tensor, "R M"]]:
    """Donates `pages`. One decoder layer for many tokens.

    Args:
        w: The weights of the layer.
        x: The hidden states.
        h: The norm of `x` with this layer's norm weight.
        gain: The norm weight of the next layer, or of the final norm.
        pages: The KV memory. k and v go into layer `index`.
        index: The layer's index in `pages`.
        cos: Cosines of the rotary angles.
        sin: Sines of the rotary angles.
        batch: The tokens of the step.
        config: The model's config.
        wanted: The tokens to compute after attention; None for all. The last layer needs only the tokens whose logits are returned.
        cuts: The tile configurations of the kernels.

    Returns:
        The next hidden states, and their norm with `gain`.
    """
    return finished(wide_layer_steps(w, x, h, gain, pages, index, cos, sin, batch, config, wanted=wanted, cuts=cuts))


def wide_layer_steps(
    w: Layer[Tensor],
    x: Float[Tensor, "T M"],
    h: Float[Tensor, "T M"],
    gain: Float[Tensor, "M"],
    pages: Float[Tensor, "L N 2 K S W"],
    index: int,
    cos: Float32[Tensor, "T 1 D"],
    sin: Float32[Tensor, "T 1 D"],
    batch: Batch,
    config: ModelConfig,
    *,
    wanted: Int32[Tensor, "R"] | None = None,
    cuts: StepCuts = DEFAULT,
    ahead: bool = False,
) -> Steps[tuple[Float[Tensor, "R M"], Float[Tensor, "R M"]]]:
    """Donates `pages`. The generator that computes and returns what `wide_layer` returns.

    With `ahead` it yields after the beginning of each sum over the ranks, and waits for the sum when it goes on. In between the caller may
    run other tokens. Without `ahead` it never yields. The other arguments are those of `wide_layer`.
    """
    eps = config.rms_norm_eps
    a = _attend(w, norm_linear(h, w.qkv, bias=w.qkv_bias, cut=cuts.qkv), pages, index, cos, sin, batch, config)
    if wanted is not None:
        a, x, cuts = a[wanted], x[wanted], DEFAULT  # `cuts` is tuned for the number of all tokens
        if not len(wanted):
            return x, x
    normed = _begin_added_normed(a, w.o, w.o_bias, x, w.post_norm, eps, w.o_norm, cuts.o, config.mesh, 0, ahead)
    if ahead:
        yield
    x, h = normed()
    if w.gate_up is None or w.down is None:
        normed = _begin_experts_normed(w, x, h, gain, config, ahead)
        if ahead:
            yield
        return normed()
    if w.experts is not None:
        routed = _begin_routed(w, h, config, ahead)
        if ahead:
            yield
        x = x + routed()
    h = norm_linear(h, w.gate_up, gated=True, act=config.hidden_act, cut=cuts.gate_up)
    normed = _begin_added_normed(h, w.down, w.down_bias, x, gain, eps, w.down_norm, cuts.down, config.mesh, 1, ahead)
    if ahead:
        yield
    return normed()


def finished(steps: Steps[R]) -> R:
    """Run a generator to its end, and return what it returns."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def head(
    x: Float[Tensor, "R M"],
    gain: Float[Tensor, "M"],
    weight: Float[Tensor, "V M"] | QuantisedMatrix,
    eps: float,
    *,
    cuts: Cuts | None = None,
) -> Float[Tensor, "R V"]:
    """The final norm and the logits, as `layers.head` computes them."""
    if x.shape[0] <= few.FEW:
        return norm_linear(x, weight, gain=gain, eps=eps, cut=() if cuts is None else cuts.at(x.shape[0]).head)
    return linear(norm_add(x, gain, None, eps), weight)


def _wanted(x: Float[Tensor, "T M"], batch: Batch) -> Float[Tensor, "R M"]:
    """The hidden states of the tokens whose logits are returned."""
    return x if batch.logit_indices is None else x[batch.logit_indices]


def _added(
    x: Float[Tensor, "T K"],
    weight: Tensor | QuantisedMatrix,
    bias: Tensor | None,
    gain: Tensor | None,
    residual: Tensor,
    eps: float,
    cut: Cut,
    mesh: Mesh | None,
    slot: int,
) -> Float[Tensor, "T M"]:
    """A product, summed over the ranks, plus the residual. With a norm weight, the product is normed before the sum, in one more launch.

    `slot` is that of `all_reduce_add`.
    """
    if gain is None and mesh is None:
        return norm_linear(x, weight, bias=bias, residual=residual, cut=cut)
    product = norm_linear(x, weight, bias=bias, cut=cut)
    if gain is not None:
        return norm_add(all_reduce(product, mesh), gain, residual, eps)
    assert mesh is not None
    return all_reduce_add(product, residual, mesh, slot)


def _begin_added_normed(
    x: Float[Tensor, "T K"],
    weight: Tensor | QuantisedMatrix,
    bias: Tensor | None,
    residual: Tensor,
    gain: Tensor,
    eps: float,
    inner: Tensor | None,
    cut: Cut,
    mesh: Mesh | None,
    slot: int,
    ahead: bool,
) -> Wait[tuple[Float[Tensor, "T M"], Float[Tensor, "T M"]]]:
    """As `linear_add_norm`, with the product summed over the ranks. `slot` is that of `all_reduce_add`.

    The function that is returned waits for the sum, which without `ahead` has been taken.
    """
    if mesh is None:
        return _known(linear_add_norm(x, weight, bias, residual, gain, eps, inner=inner, cut=cut))
    if inner is not None:
        summed = _begin_sum(norm_linear(x, weight, bias=bias), mesh, ahead)

        def normed() -> tuple[Tensor, Tensor]:
            x = norm_add(summed(), inner, residual, eps)
            return x, norm_add(x, gain, None, eps)

        return normed
    if isinstance(weight, QuantisedMatrix):
        parts, bias = norm_linear(x, weight, bias=bias, cut=cut).unsqueeze(0), None
    else:
        parts, bias = product_in_parts(x, weight, bias, cut)
    return _begin_sum_normed(parts, bias, residual, gain, eps, mesh, slot, ahead)


def _begin_sum_normed(
    parts: Tensor, bias: Tensor | None, residual: Tensor, gain: Tensor, eps: float, mesh: Mesh, slot: int, ahead: bool
) -> Wait[tuple[Float[Tensor, "T M"], Float[Tensor, "T M"]]]:
    """`all_reduce_add_norm`. Without `ahead` the sum has been taken."""
    if ahead:
        return begin_all_reduce_add_norm(parts, bias, residual, gain, eps, mesh)
    return _known(all_reduce_add_norm(parts, bias, residual, gain, eps, mesh, slot))


def _known(result: R) -> Wait[R]:
    """The function that waits for nothing."""
    return lambda: result


def _begin_sum(x: Tensor, mesh: Mesh | None, ahead: bool) -> Wait[Tensor]:
    """Donates `x`. The sum over the ranks, if there are several; without `ahead` it has been taken."""
    return begin_all_reduce(x, mesh) if ahead and mesh is not None else _known(all_reduce(x, mesh))


def _routed(w: Layer[Tensor], h: Float[Tensor, "T M"], config: ModelConfig) -> Float[Tensor, "T M"]:
    """The output of a layer's experts, summed over the ranks. `h` is the output of its second norm."""
    return _begin_routed(w, h, config, ahead=False)()


def _begin_routed(w: Layer[Tensor], h: Float[Tensor, "T M"], config: ModelConfig, ahead: bool) -> Wait[Float[Tensor, "T M"]]:
    assert w.experts is not None and config.moe is not None
    return _begin_sum(layers.mixture(h, w.experts, config.moe, config.hidden_act), config.mesh, ahead)


def _experts_added(w: Layer[Tensor], x: Tensor, config: ModelConfig) -> Float[Tensor, "T M"]:
    """`x` plus the output of a layer's experts. The router's kernel norms `x`."""
    e, moe, mesh = w.experts, config.moe, config.mesh
    assert e is not None and moe is not None
    how = moe.top_k, moe.normalise, moe.least_sum
    h, chosen, weights = norm_route(x, w.post_norm, e.router, e.bias, config.rms_norm_eps, *how)
    y = any_experts(h, e.gate_up, e.down, chosen, weights, config.hidden_act, x if mesh is None else None)
    return y if mesh is None else all_reduce_add(y, x, mesh, 1)


def _begin_experts_normed(
    w: Layer[Tensor], x: Tensor, h: Tensor, gain: Tensor, config: ModelConfig, ahead: bool
) -> Wait[tuple[Float[Tensor, "T M"], Float[Tensor, "T M"]]]:
    """`x` plus the output of a layer's experts on its norm `h`, and the norm of that with weight `gain`."""
    e, moe, mesh, eps = w.experts, config.moe, config.mesh, config.rms_norm_eps
    assert e is not None and moe is not None
    logits = norm_linear(h.to(e.router.dtype), e.router)
    chosen, weights = route(logits, e.bias, moe.top_k, moe.normalise, moe.least_sum)
    y = any_experts(h, e.gate_up, e.down, chosen, weights, config.hidden_act, x if mesh is None else None)
    if mesh is None:
        return _known((y, norm_add(y, gain, None, eps)))
    return _begin_sum_normed(y.unsqueeze(0), None, x, gain, eps, mesh, 1, ahead)


def _attend(
    w: Layer[Tensor], qkv: Tensor, pages: Tensor, index: int, cos: Tensor, sin: Tensor, batch: Batch, config: ModelConfig
) -> Float[Tensor, "T heads"]:
    scale, eps = config.scale, config.rms_norm_eps
    tables, seq_lens, slots, limits = batch.page_tables, batch.seq_lens, batch.slots, (batch.window, config.attention_softcap)
    if batch.cu_seqlens is not None:
        q, k, v = rope_write(qkv, w.q_norm, w.k_norm, cos, sin, pages, index, slots, eps)
        return paged_prefill(q, pages, index, tables, seq_lens, batch.cu_seqlens, scale, batch.plan, k, v, *limits).flatten(1)
    return rope_attend(qkv, w.q_norm, w.k_norm, cos, sin, pages, index, tables, seq_lens, slots, scale, eps, batch.plan, *limits)
