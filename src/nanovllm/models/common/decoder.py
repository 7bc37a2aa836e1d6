"""The forward pass of a decoder: embedding, layers, head. All architectures share it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, overload

import torch
from torch.utils import _pytree as pytree

from nanovllm.config import Mesh, ModelConfig
from nanovllm.errors import InvalidRequestError
from nanovllm.models.common import layers
from nanovllm.models.common.batch import Batch
from nanovllm.models.common.hidden import Added, added, require_hidden
from nanovllm.models.common.params import Params
from nanovllm.ops.distributed.collectives import all_gather_columns
from nanovllm.ops.elementwise.norm_rope import soft_cap
from nanovllm.state.kv_cache import KVState
from nanovllm.types import Float, Tensor

KV = TypeVar("KV", KVState, None)


@overload
def forward(
    params: Params[Tensor],
    kv: KV,
    batch: Batch,
    config: ModelConfig,
    *,
    layer: Callable[..., Tensor] = layers.layer,
    head: Callable[..., Tensor] = layers.head,
    inputs_embeds: Float[Tensor, "..."] | None = None,
    add_hidden: Added | None = None,
    capture_hidden: None = None,
) -> tuple[Float[Tensor, "R V"], KV]: ...


@overload
def forward(
    params: Params[Tensor],
    kv: KV,
    batch: Batch,
    config: ModelConfig,
    *,
    layer: Callable[..., Tensor] = layers.layer,
    head: Callable[..., Tensor] = layers.head,
    inputs_embeds: Float[Tensor, "..."] | None = None,
    add_hidden: Added | None = None,
    capture_hidden: Sequence[int],
) -> tuple[Float[Tensor, "R V"], KV, tuple[Float[Tensor, "_T M"], ...]]: ...


def forward(
    params: Params[Tensor],
    kv: KV,
    batch: Batch,
    config: ModelConfig,
    *,
    layer: Callable[..., Tensor] = layers.layer,
    head: Callable[..., Tensor] = layers.head,
    inputs_embeds: Float[Tensor, "..."] | None = None,
    add_hidden: Added | None = None,
    capture_hidden: Sequence[int] | None = None,
) -> tuple[Float[Tensor, "R V"], KV] | tuple[Float[Tensor, "R V"], KV, tuple[Float[Tensor, "_T M"], ...]]:
    """Donates `kv`. Run one step's tokens.

    Args:
        params: The weights.
        kv: The KV memory. It is overwritten; use the returned value. None: the batch holds whole prompts, whose tokens attend to one
            another, and `torch.func` can transform the function.
        batch: The tokens of the step.
        config: The model's config.
        layer: The architecture's layer function, or another form of it: compiled, or a kernel.
        head: The architecture's head, or another form of it.
        inputs_embeds: Rows in place of those of the embedding table, `[T, M]`.
        add_hidden: By layer, a tensor `[M]` or `[T, M]` to add to its output.
        capture_hidden: The layers whose outputs are returned; None: only logits and KV are.

    Returns:
        The logits `[R, V]` in the model's dtype, and the KV state that holds the new keys and values. With `capture_hidden`, also the
        outputs `[T, M]` of these layers, in their order.
    """
    if kv is None and batch.cu_seqlens is None:
        raise InvalidRequestError("kv=None needs a batch of whole prompts, but cu_seqlens=None is a decode batch, whose KV is in pages")
    if kv is not None and batch.page_tables.shape[1] == 0:
        raise InvalidRequestError("the page tables have no columns, as those of Batch.of_prompts: pass kv=None, or a batch with pages")
    if kv is None and config.mesh is not None:
        _require_own_program(config.mesh, (params, inputs_embeds, add_hidden))
    num_tokens = batch.input_ids.shape[0]
    require_hidden(params, num_tokens, inputs_embeds, add_hidden, capture_hidden, differentiable=kv is None)
    functions, pools = (layers.PLAIN, ()) if kv is None else (layers.ENGINE, kv.pools)
    captured: dict[int, Tensor] = {}
    x_TM = layers.embed(params, batch, config, inputs_embeds)
    # Not strict: some callers run only the first layers.
    each = zip(params.layers, config.places, layers.given_each(params, batch, config, functions), strict=False)
    for number, (w, (pool, index), (cos, sin, view)) in enumerate(each):
        x_TM = layer(w, x_TM, pools[pool] if pools else None, index, cos, sin, view, config)
        x_TM = x_TM if add_hidden is None else added(x_TM, add_hidden.get(number))
        if capture_hidden is not None and number in capture_hidden:
            captured[number] = x_TM
    x_RM = x_TM if batch.logit_indices is None else x_TM[batch.logit_indices]
    out = logits(head if kv is not None else partial(head, functions=functions), x_RM, params, config)
    return (out, kv) if capture_hidden is None else (out, kv, tuple(captured[number] for number in capture_hidden))


def _require_own_program(mesh: Mesh, inputs: Any) -> None:
    """Require a call without KV that ranks can make: by the program of each of them, and without gradients.

    Raises:
        InvalidRequestError: It is not.
    """
    if mesh.led:
        raise InvalidRequestError(
            "forward: the other ranks repeat calls with a state alone: run the whole program on every rank, with torchrun"
        )
    learns = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor))
    if learns or torch._C._functorch.peek_interpreter_stack() is not None:  # pyright: ignore[reportAttributeAccessIssue]
        raise InvalidRequestError(f"gradients do not pass through the sums of {mesh.size} ranks: load the model on one")


def logits(
    head: Callable[..., Tensor],
    x_RM: Float[Tensor, "R M"],
    params: Params[Tensor],
    config: ModelConfig,
    *,
    cap: Callable[[Tensor, float], Tensor] = soft_cap,
) -> Float[Tensor, "R V"]:
    """The logits of the last layer's output, computed by `head`, and soft-capped by `cap` if the model has a soft cap.

    They are those of all tokens, unless `config.mesh.gathers` is False: then those of this rank's part of the head.
    """
    weight = params.embed if params.head is None else params.head
    bias = () if params.final_norm_bias is None else (params.final_norm_bias,)
    own = head(x_RM, params.final_norm, weight, config.rms_norm_eps, *bias)
    return cap(gathered(own, config), config.logit_softcap)


def gathered(own: Float[Tensor, "R N"], config: ModelConfig) -> Float[Tensor, "R V"]:
    """The logits of all tokens from those of a rank's part of the head; the latter themselves if the ranks of the config gather none."""
    return own if config.mesh is None or not config.mesh.gathers else all_gather_columns(own, config.mesh, config.vocab_size)
