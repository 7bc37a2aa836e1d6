"""A decode step on a CPU: one call of C (`ops/cpu/kernels.c`) for all layers and the head, in place of dozens of small ops per layer.

`forward` runs a step. `decode_layer` and `head`, its parts with the same bits, replace a model's `layer` and `layers.head`, and agree with
them within rounding. The bits of a row do not depend on the other rows. Matrices may be quantised, and KV may be in FP8.
"""

import ctypes
import functools
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch.utils import _pytree as pytree

from nanovllm.config import ModelConfig
from nanovllm.models.common import decoder, layers
from nanovllm.models.common.batch import Batch
from nanovllm.models.common.params import Layer, Params, matrices
from nanovllm.models.fast.choice import beyond
from nanovllm.ops.cpu.build import library
from nanovllm.ops.cpu.native import DTYPES, SOURCE, SYMBOLS, Matrix, functions
from nanovllm.ops.kv_cache.fp8 import FP8, head_dim_of, in_fp8
from nanovllm.ops.linear.cpu_product import address, cells, fields, unsupported
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.state.kv_cache import KVState
from nanovllm.types import Float, Float32, Tensor

__all__ = ("DTYPES", "SOURCE", "SYMBOLS", "decode_layer", "forward", "head", "serves", "unknown")
SIZES = ("B", "M", "H", "K", "D", "V", "page_size", "threads", "bf16", "fp8")
VIEW, LAYER = 7, 11 + 4 * len(Matrix._fields_)  # numbers of `struct view` and `struct layer`, of 8 bytes each


class Step(ctypes.Structure):
    """`struct step` of the C file. The fields must have the same order and types."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "seq_lens", "scratch", "cells", "out", "final_norm", "logits")),
        ("head", Matrix),
        *((name, ctypes.c_int64) for name in SIZES),
        *((name, ctypes.c_float) for name in ("eps", "scale", "softcap")),
    )


def serves(params: Params[Tensor], kv: KVState, batch: Batch, config: ModelConfig) -> bool:
    """Whether these functions can run the step: a decode batch in float32 or bfloat16 on a CPU, eagerly, with a C compiler.

    KV may be in FP8.
    """
    embed, pages = params.embed, kv.pools[0]
    return (
        batch.cu_seqlens is None
        and batch.plan == 0
        and embed.device.type == pages.device.type == batch.input_ids.device.type == "cpu"
        and embed.dtype in DTYPES
        and pages.dtype in (embed.dtype, FP8)
        and batch.page_tables.shape[1] > 0
        and all(pool.is_contiguous() and _alike(pool, pages) for pool in kv.pools)
        and type(batch.input_ids) is type(pages) is Tensor
        and not unknown(params, config)
        and not _traced()
        and not (torch.is_grad_enabled() and any(w is not None and w.requires_grad for w in pytree.tree_leaves(params)))
        and library(SOURCE, SYMBOLS) is not None
    )


def unknown(params: Params[Any], config: ModelConfig) -> str:
    """The feature of a model that these functions do not support; empty if they support all. They support windows and soft caps."""
    if known := beyond(params, config):
        return known
    if config.mesh is not None:
        return "layers that several ranks share"
    weights = (params.head, *(matrix for layer in params.layers for matrix in matrices(layer)))
    for matrix in weights if config.moe is None else ():
        if isinstance(matrix, QuantisedMatrix) and (why := unsupported(matrix)):
            return why
    layer = params.layers[0]
    if layer.input_norm.dtype != params.embed.dtype:
        return "norms that are rounded after their weight"
    if config.hidden_act != "silu":
        return f"the activation {config.hidden_act}"
    if layer.o_norm is not None or layer.down_norm is not None:
        return "norms after attention and MLP"
    return "experts" if config.moe is not None else ""


def _alike(pool: Tensor, first: Tensor) -> bool:
    """Whether C may read a pool by the page size, the heads and the dtype of the first one."""
    if pool is first:
        return True
    return (type(pool), pool.device, pool.dtype, pool.shape[2:]) == (type(first), first.device, first.dtype, first.shape[2:])


def _traced() -> bool:
    """Whether a tracer, a transform, a dispatch mode or autocast is active, which must see every op."""
    return (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch.is_autocast_enabled("cpu")
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]
    )


def forward(params: Params[Tensor], kv: KVState, batch: Batch, config: ModelConfig) -> tuple[Float[Tensor, "B V"], KVState]:
    """Donates `kv`. Run a step that these functions serve, as `decoder.forward` does. Returns the logits of all rows, and the KV state.

    Raises:
        TypeError: A weight has another dtype than the activations. Nothing was written.
        ValueError: A weight has another shape than the config says. Nothing was written.
        IndexError: A slot or a page table points outside its pool, or a pool has fewer layers than the model. Nothing was written.
    """
    given = layers.given_each(params, batch, config, layers.PLAIN)

    def layers_and_head(x: Tensor, gain: Tensor, weight: Tensor | QuantisedMatrix, _: float) -> Tensor:
        return _run(params.layers, x, kv.pools, config.places, given, config, (gain, weight))

    return decoder.logits(layers_and_head, layers.embed(params, batch, config), params, config), kv


def decode_layer(
    w: Layer[Tensor],
    x: Float[Tensor, "B M"],
    pages: Float[Tensor, "L N 2 K S W"],
    index: int,
    cos: Float32[Tensor, "B 1 D"],
    sin: Float32[Tensor, "B 1 D"],
    batch: Batch,
    config: ModelConfig,
) -> Float[Tensor, "B M"]:
    """Donates `pages`. One decoder layer with the signature of a model's `layer`; writes k and v of layer `index` into `pages`.

    Raises what `forward` raises.
    """
    return _run((w,), x, (pages,), ((0, index),), ((cos, sin, batch),), config)


def head(
    x: Float[Tensor, "R M"], gain: Float[Tensor, "M"], weight: Float[Tensor, "V M"] | QuantisedMatrix, eps: float
) -> Float[Tensor, "R V"]:
    """The final norm and the logits, as `layers.head` computes them."""
    (num_rows, hidden_size), kept = x.shape, list[Tensor]()
    scratch, room = torch.empty(num_rows * hidden_size, dtype=torch.float32, device="cpu"), cells(num_rows, weight)
    step = Step(
        x=_vector(x, x.shape, x.dtype, kept), scratch=scratch.data_ptr(), cells=room.data_ptr(), B=num_rows, M=hidden_size,
        threads=torch.get_num_threads(), bf16=x.dtype == torch.bfloat16, eps=eps,
    )  # fmt: skip
    logits = _add_head(step, x, gain, weight, kept)
    _functions().nanovllm_step(ctypes.byref(step), None, ctypes.c_int64(0), None, ctypes.c_int64(0))
    return logits


def _run(
    weights: Sequence[Layer[Tensor]],
    x: Tensor,
    pools: Sequence[Tensor],
    places: Sequence[tuple[int, int]],
    given: Sequence[tuple[Tensor, Tensor, Batch]],
    config: ModelConfig,
    last: tuple[Tensor, Tensor | QuantisedMatrix] | None = None,
) -> Tensor:
    """Donates `pools`. Run layers one after another, and the final norm and the head if their weights are given, in one call of C.

    All addresses are read anew, because a weight may have other memory at the next step. They are read in one pass: after a call of C
    little of what Python needs is in the processor's caches.

    Args:
        weights: The weights of the layers.
        x: The input of the first layer.
        pools: The KV memory.
        places: For each layer, its pool and its index in the pool.
        given: For each layer, what `layers.given_each` gives it.
        config: The model's config.
        last: The gain of the final norm and the matrix of the head; None if they do not run.

    Returns:
        The logits, or without a head the output of the last layer.
    """
    (num_rows, hidden_size), dtype, kept = x.shape, x.dtype, list[Tensor]()
    (num_kv_heads, page_size), head_dim, threads = pools[0].shape[3:5], head_dim_of(pools[0]), torch.get_num_threads()
    starts = [(pool.data_ptr(), pool.stride(0) * pool.element_size()) for pool in pools]
    of_views, of_layers, widest = array("q"), array("q"), 0
    sizes = hidden_size, config.num_heads * head_dim, (config.num_heads + 2 * num_kv_heads) * head_dim, head_dim
    views: dict[int, tuple[int, Batch]] = {}  # by window: the view's number, and what its layers are given
    for w, (pool, index), (cos, sin, batch) in zip(weights, places, given, strict=False):
        if batch.window not in views:
            views[batch.window] = len(views), batch
            of_views.extend(_view(cos, sin, batch, num_rows, pools[pool].shape[1], kept))
        (start, size), (view, _) = starts[pool], views[batch.window]
        if index >= pools[pool].shape[0]:
            raise IndexError(f"layer {index} of a pool of shape {tuple(pools[pool].shape)}, which has fewer layers than the model")
        of_layers.extend(_layer(w, start + index * size, view, sizes, dtype, kept))
        widest = max(widest, of_layers[-2])
    batch, group = given[0][2], config.num_heads // num_kv_heads
    a_row = 2 * hidden_size + 2 * (config.num_heads + num_kv_heads) * head_dim + 3 * widest
    a_thread = group * max(view.page_tables.shape[1] for _, view in views.values()) * page_size + (group + 1) * head_dim
    scratch = torch.empty(num_rows * a_row + threads * a_thread, dtype=torch.float32, device="cpu")
    room = cells(num_rows, *(matrix for w in weights for matrix in matrices(w)), *(() if last is None else last[1:]))
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    step = Step(
        x=_vector(x, x.shape, dtype, kept), seq_lens=_converted(batch.seq_lens, torch.int32, kept), scratch=scratch.data_ptr(),
        cells=room.data_ptr(), out=out.data_ptr(), B=num_rows, M=hidden_size, H=config.num_heads, K=num_kv_heads, D=head_dim,
        page_size=page_size, threads=threads, bf16=dtype == torch.bfloat16, fp8=in_fp8(pools[0]), eps=config.rms_norm_eps,
        scale=config.scale, softcap=config.attention_softcap,
    )  # fmt: skip
    result = out if last is None else _add_head(step, x, *last, kept)
    wrong = _functions().nanovllm_step(
        ctypes.byref(step),
        ctypes.c_void_p(of_views.buffer_info()[0]), ctypes.c_int64(len(of_views) // VIEW),
        ctypes.c_void_p(of_layers.buffer_info()[0]), ctypes.c_int64(len(of_layers) // LAYER),
    )  # fmt: skip
    if wrong:
        _, batch = list(views.values())[wrong - 1]
        raise IndexError(
            f"slots {batch.slots.tolist()}, seq_lens {batch.seq_lens.tolist()} or page tables {batch.page_tables.tolist()} point outside "
            f"{of_views[VIEW * wrong - 2]} pages of {page_size} tokens"
        )
    return result


def _view(cos: Tensor, sin: Tensor, batch: Batch, num_rows: int, num_pages: int, kept: list[Tensor]) -> tuple[int, ...]:
    """The numbers of `struct view`. Raises `IndexError` for another number of rows."""
    tables, slots = batch.page_tables, batch.slots
    if not len(tables) == len(batch.seq_lens) == len(slots) == len(cos) == num_rows:
        raise IndexError(f"{num_rows} rows, but seq_lens {tuple(batch.seq_lens.shape)} and slots {tuple(slots.shape)}")
    floats = (_converted(tensor, torch.float32, kept) for tensor in (cos, sin))
    return *floats, *(_converted(tensor, torch.int32, kept) for tensor in (tables, slots)), tables.shape[1], num_pages, batch.window


def _layer(w: Layer[Tensor], pages: int, view: int, sizes: tuple[int, ...], dtype: torch.dtype, kept: list[Tensor]) -> tuple[int, ...]:
    """The numbers of `struct layer`. `sizes`: M, the widths of all query heads and of all heads, and D."""
    assert w.gate_up is not None and w.down is not None
    (hidden, mixed, heads, head_dim), down = sizes, w.down
    wide = down.columns if isinstance(down, QuantisedMatrix) else down.shape[1]
    vectors = (
        (w.input_norm, hidden), (w.qkv_bias, heads), (w.q_norm, head_dim), (w.k_norm, head_dim), (w.o_bias, hidden), (w.post_norm, hidden),
        (w.gate_up_bias, 2 * wide), (w.down_bias, hidden),
    )  # fmt: skip
    products = ((w.qkv, (heads, hidden)), (w.o, (hidden, mixed)), (w.gate_up, (2 * wide, hidden)), (down, (hidden, wide)))
    addresses = [0 if vector is None else _vector(vector, (size,), dtype, kept) for vector, size in vectors]
    fields_of = [_matrix(matrix, shape, dtype, kept) for matrix, shape in products]
    return *addresses, pages, *chain(*fields_of), wide, view


def _add_head(step: Step, x: Tensor, gain: Tensor, weight: Tensor | QuantisedMatrix, kept: list[Tensor]) -> Tensor:
    """Make the head a part of the step. Returns the memory of its logits."""
    (num_rows, hidden_size), height = x.shape, weight.shape[0]
    logits = x.new_empty(num_rows, height)
    step.final_norm = _vector(gain, (hidden_size,), x.dtype, kept)
    step.head = Matrix(*_matrix(weight, (height, hidden_size), x.dtype, kept))
    step.logits, step.V = logits.data_ptr(), height
    return logits


def _matrix(weight: Tensor | QuantisedMatrix, shape: tuple[int, ...], dtype: torch.dtype, kept: list[Tensor]) -> tuple[int, ...]:
    """The fields of `Matrix`. Raises as `_vector`."""
    if not isinstance(weight, QuantisedMatrix):
        return _vector(weight, shape, dtype, kept), 0, 0, 0, 0, 0, 0, 0
    if (found := (weight.codes.shape[0], weight.columns)) != shape:
        raise _misshapen(found, shape)
    return fields(weight, kept)


def _vector(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, kept: list[Tensor]) -> int:
    """The tensor's address, as `address` gives it. Raises `TypeError` for another dtype, and `ValueError` for another shape."""
    if tensor.dtype != dtype:
        raise TypeError(f"a weight is {tensor.dtype} and the activations are {dtype}; both must have the same dtype")
    if tensor.shape != shape:
        raise _misshapen(tensor.shape, shape)
    return address(tensor, kept)


def _misshapen(found: tuple[int, ...], shape: tuple[int, ...]) -> ValueError:
    """The error of a weight of which C would read more memory than there is."""
    return ValueError(f"a weight has the shape {tuple(found)}, expected {shape}")


def _converted(tensor: Tensor, dtype: torch.dtype, kept: list[Tensor]) -> int:
    """The address of the tensor's numbers in `dtype`, in contiguous memory that `kept` keeps."""
    kept.append(tensor.to(dtype).contiguous())
    return kept[-1].data_ptr()


@functools.cache
def _functions() -> ctypes.CDLL:
    compiled = functions()
    assert compiled.nanovllm_structs_size() == ctypes.sizeof(Step) + 8 * (VIEW + LAYER)
    return compiled
