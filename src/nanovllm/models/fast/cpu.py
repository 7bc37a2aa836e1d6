"""A decode step on a CPU: one C call per layer and one for the head (`ops/cpu/kernels.c`), in place of dozens of small ops.

The functions replace a model's `layer` and `layers.head`, and agree with them within rounding. The bits of a row do not depend on the
other rows. Matrices may be quantised, and KV may be in FP8.
"""

import ctypes
import functools
from typing import Any

import torch
from torch.utils import _pytree as pytree

from nanovllm.config import ModelConfig
from nanovllm.models.common.batch import Batch
from nanovllm.models.common.params import Layer, Params, matrices
from nanovllm.models.fast.choice import beyond
from nanovllm.ops.cpu.build import library
from nanovllm.ops.cpu.native import DTYPES, SOURCE, SYMBOLS, Matrix, functions
from nanovllm.ops.kv_cache.fp8 import FP8, head_dim_of, in_fp8
from nanovllm.ops.linear.cpu_product import as_struct, cells, unsupported
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.state.kv_cache import KVState
from nanovllm.types import Float, Float32, Tensor

__all__ = ("DTYPES", "SOURCE", "SYMBOLS", "decode_layer", "head", "serves", "unknown")
POINTERS = (
    "x", "input_norm", "qkv_bias", "q_norm", "k_norm", "o_bias", "post_norm", "gate_up_bias", "down_bias",
    "cos", "sin", "tables", "seq_lens", "slots", "pages", "scratch", "cells", "out",
)  # fmt: skip
MATRICES = ("qkv", "o", "gate_up", "down")
SIZES = ("B", "M", "H", "K", "D", "F", "width", "num_pages", "page_size", "threads", "bf16", "fp8", "window")


class LayerArgs(ctypes.Structure):
    """`struct layer_args` of the C file. The fields must have the same order and types."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, Matrix) for name in MATRICES),
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
        and pages.is_contiguous()
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


def _traced() -> bool:
    """Whether a tracer, a transform, a dispatch mode or autocast is active, which must see every op."""
    return (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch.is_autocast_enabled("cpu")
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]
    )


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

    Raises:
        TypeError: A weight has another dtype than the activations.
        IndexError: A slot or a page table points outside the pool. Nothing was written.
    """
    (num_rows, hidden_size), (_, num_pages, _, num_kv_heads, page_size, _) = x.shape, pages.shape
    head_dim = head_dim_of(pages)
    assert w.gate_up is not None and w.down is not None
    products = (w.qkv, w.o, w.gate_up, w.down)
    heads_dim, intermediate = config.num_heads * head_dim, w.down.columns if isinstance(w.down, QuantisedMatrix) else w.down.shape[1]
    width, threads = batch.page_tables.shape[1], torch.get_num_threads()
    group = config.num_heads // num_kv_heads
    a_row = 2 * hidden_size + heads_dim + 2 * num_kv_heads * head_dim + heads_dim + 3 * intermediate
    a_thread = group * width * page_size + (group + 1) * head_dim
    scratch = torch.empty(num_rows * a_row + threads * a_thread, dtype=torch.float32, device="cpu")
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    room = cells(num_rows, *products)
    weights = (x, w.input_norm, w.qkv_bias, w.q_norm, w.k_norm, w.o_bias, w.post_norm, w.gate_up_bias, w.down_bias)
    memory = [
        *(_memory(tensor, x.dtype) for tensor in weights),
        *(tensor.to(torch.float32).contiguous() for tensor in (cos, sin)),
        *(tensor.to(torch.int32).contiguous() for tensor in (batch.page_tables, batch.seq_lens, batch.slots)),
    ]
    if not len(batch.page_tables) == len(batch.seq_lens) == len(batch.slots) == len(cos) == num_rows:
        raise IndexError(f"{num_rows} rows, but seq_lens {tuple(batch.seq_lens.shape)} and slots {tuple(batch.slots.shape)}")
    structs = [_matrix(product, x.dtype) for product in products]
    args = LayerArgs(
        *(None if tensor is None else tensor.data_ptr() for tensor in memory),
        pages[index].data_ptr(), scratch.data_ptr(), room.data_ptr(), out.data_ptr(), *(struct for struct, _ in structs),
        num_rows, hidden_size, config.num_heads, num_kv_heads, head_dim, intermediate, width, num_pages, page_size, threads,
        x.dtype == torch.bfloat16, in_fp8(pages), batch.window, config.rms_norm_eps, config.scale, config.attention_softcap,
    )  # fmt: skip
    if _functions().nanovllm_layer(ctypes.byref(args)):
        raise IndexError(
            f"slots {batch.slots.tolist()}, seq_lens {batch.seq_lens.tolist()} or page tables {batch.page_tables.tolist()} point outside "
            f"{num_pages} pages of {page_size} tokens"
        )
    return out


def head(
    x: Float[Tensor, "R M"], gain: Float[Tensor, "M"], weight: Float[Tensor, "V M"] | QuantisedMatrix, eps: float
) -> Float[Tensor, "R V"]:
    """The final norm and the logits, as `layers.head` computes them."""
    (num_rows, hidden_size), vocab_size = x.shape, weight.shape[0]
    scratch, out = torch.empty(num_rows * hidden_size, dtype=torch.float32, device="cpu"), x.new_empty(num_rows, vocab_size)
    room, (struct, kept) = cells(num_rows, weight), _matrix(weight, x.dtype)
    rows, gains = _memory(x, x.dtype), _memory(gain, x.dtype)
    assert rows is not None and gains is not None and kept
    _functions().nanovllm_head(
        ctypes.c_void_p(rows.data_ptr()), ctypes.c_void_p(gains.data_ptr()), ctypes.byref(struct),
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (out, scratch, room)),
        *map(ctypes.c_int64, (num_rows, hidden_size, vocab_size, x.dtype == torch.bfloat16, torch.get_num_threads())),
        ctypes.c_float(eps),
    )  # fmt: skip
    return out


def _memory(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The tensor in contiguous memory, as C reads it. Raises `TypeError` for another dtype."""
    if tensor is None:
        return None
    if tensor.dtype != dtype:
        raise TypeError(f"a weight is {tensor.dtype} and the activations are {dtype}; both must have the same dtype")
    return tensor.contiguous()


def _matrix(weight: Tensor | QuantisedMatrix, dtype: torch.dtype) -> tuple[Matrix, tuple[Tensor, ...]]:
    """A matrix as C reads it, and the tensors that must outlive the call. Raises `TypeError` for another dtype of plain weights."""
    if not isinstance(weight, QuantisedMatrix) and weight.dtype != dtype:
        raise TypeError(f"a weight is {weight.dtype} and the activations are {dtype}; both must have the same dtype")
    return as_struct(weight)


@functools.cache
def _functions() -> ctypes.CDLL:
    compiled = functions()
    assert compiled.nanovllm_layer_args_size() == ctypes.sizeof(LayerArgs)
    return compiled
