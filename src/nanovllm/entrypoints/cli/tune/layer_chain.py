"""A chain of decoder layers, launched as `fused.forward` launches them. Tile configurations are timed in it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.utils import _pytree as pytree

from nanovllm.config import ModelConfig
from nanovllm.entrypoints.cli.tune.kernel_search import Unfit
from nanovllm.models.common.batch import Batch
from nanovllm.models.common.layers import rope_angles
from nanovllm.models.fast import fused
from nanovllm.models.fast.cuts import StepCuts
from nanovllm.models.model import Model
from nanovllm.ops.attention.fused_plan import FusedDecodePlan
from nanovllm.ops.cuts import Cut
from nanovllm.state.kv_cache import bytes_per_page
from nanovllm.types import Float, Float32, Tensor

LAYERS = 16  # least length of a chain; a model with fewer layers is run through again
CONTEXTS = (256, 1024)  # tokens of the longest row, whole pages; the shortest row has half
TOKENS = 16384  # tokens of all rows together; above it only the shorter context is measured
PAGE = 16  # tokens of a page
SHARE = 0.8  # fraction of the free memory for KV


class Plans:
    """The attention plan of a tile configuration. Only the latest is kept: graphs that recorded an older plan must not be replayed."""

    def __init__(self, model: Model, rows: int) -> None:
        c = model.config
        self._shape = (rows, c.num_heads, c.num_kv_heads, c.head_dim, model.device)
        self._made: dict[Cut, FusedDecodePlan] = {}

    def at(self, cut: Cut) -> FusedDecodePlan:
        """The plan of a tile configuration. Raises `CutError` if it does not fit the GPU."""
        if cut not in self._made:
            made = FusedDecodePlan(*self._shape, cut)
            self._made.clear()
            self._made[cut] = made
        return self._made[cut]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Context:
    """A decode batch over pages of random KV that belong to no other context. `batch.plan` is not set."""

    batch: Batch
    pages: Float[Tensor, "L N 2 K S D"]
    cos: Float32[Tensor, "B 1 D"]
    sin: Float32[Tensor, "B 1 D"]


def run_layers(model: Model, context: Context, plan: FusedDecodePlan, cuts: StepCuts, x: Float[Tensor, "B M"], count: int) -> None:
    """Launch `count` layers with these tile configurations on the hidden states `x`.

    Donates `context.pages`: the layers write KV into their layers, cyclically.
    """
    layers, pages, cos, sin = model.params.layers, context.pages, context.cos, context.sin
    batch, config, h = replace(context.batch, plan=plan.handle), model.config, x
    closely = fused.follows_closely(model.params, len(x))
    for number in range(count):
        w, index = layers[number % len(layers)], number % len(pages)
        if closely:
            x = fused.decode_layer(w, x, pages, index, cos, sin, batch, config, cuts=cuts)
        else:
            gain = layers[(number + 1) % len(layers)].input_norm
            x, h = fused.wide_layer(w, x, h, gain, pages, index, cos, sin, batch, config, cuts=cuts)


def chain_length(model: Model) -> int:
    """The length of a chain: as many layers as have twice the size of the GPU's L2 cache, if the model has them; at least `LAYERS`."""
    cached = torch.cuda.get_device_properties(model.device).L2_cache_size
    layers = model.params.layers
    layer = sum(leaf.numel() * leaf.element_size() for leaf in pytree.tree_leaves(layers[0]) if isinstance(leaf, Tensor))
    return max(LAYERS, min(len(layers), math.ceil(2 * cached / layer)))


def contexts(model: Model, rows: int, count: int) -> tuple[Context, ...]:
    """The contexts to measure with `rows` rows: KV for `count` layers each, or fewer if memory is short.

    Raises `Unfit` if the memory is too small for one layer.
    """
    most, kv_layers = fitting(model.config, model.dtype, rows, count, _free(model.device))
    c, device, widths = model.config, model.device, [longest // PAGE for longest in most]
    pages = torch.randn(kv_layers, rows * sum(widths), 2, c.num_kv_heads, PAGE, c.head_dim, dtype=model.dtype, device=device)
    tables = torch.randperm(rows * sum(widths), device=device).int().view(rows, -1).split(widths, dim=1)
    return tuple(_context(model, pages, table.contiguous(), longest) for table, longest in zip(tables, most, strict=True))


def fitting(config: ModelConfig, dtype: torch.dtype, rows: int, count: int, free: int) -> tuple[tuple[int, ...], int]:
    """The lengths of the contexts, and the number of layers with KV of their own, that fit into `free` bytes.

    Both contexts are preferred, then only the shorter one, then the shorter one with fewer layers. Raises `Unfit` if not one layer fits.
    """
    layer_page = bytes_per_page(config, page_size=PAGE, dtype=dtype) // config.num_layers
    for most in _wanted(rows):
        fit = int(SHARE * free) // (layer_page * rows * sum(most) // PAGE)
        if fit >= count or (fit and len(most) == 1):
            return most, min(count, fit)
    raise Unfit("not enough memory")


def _wanted(rows: int) -> Iterator[tuple[int, ...]]:
    if CONTEXTS[-1] * rows <= TOKENS:
        yield CONTEXTS
    yield CONTEXTS[:1]


def _context(model: Model, pages: Tensor, tables: Tensor, longest: int) -> Context:
    rows, device = len(tables), model.device
    lens = torch.linspace(longest, longest // 2, rows, device=device).round().int()
    last = lens - 1
    slots = (tables[torch.arange(rows, device=device), (last // PAGE).long()] * PAGE + last % PAGE).int()
    cos, sin = rope_angles(last, model.params.inv_freq, model.config.rope)
    batch = Batch(input_ids=torch.zeros_like(last), positions=last, slots=slots, page_tables=tables, seq_lens=lens)
    return Context(batch=batch, pages=pages, cos=cos, sin=sin)


def _free(device: torch.device) -> int:
    """Bytes that this process can allocate: the free memory of the GPU, and the memory cached by torch."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
