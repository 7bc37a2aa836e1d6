"""Measuring on a GPU: kernels as a decode step runs them, one behind the other in a CUDA graph, over weights or KV that no cache holds."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch

from ..model import Model
from ..model_check.compare import relative_error
from ..model_check.examine import kernel_errors
from ..ops.cuts import Cut, CutError
from ..ops.norm_linear import norm_linear
from ..ops.rope_attend import FusedDecodePlan, rope_attend
from ..ops.wide import linear_add_norm
from ..types import Float, Tensor
from .search import Measure, Times, Unfit
from .work import Work

REPEATS = 15  # replays of a graph, of which the median counts
LAUNCHES = 8  # in a graph, at least
COPIES = 128  # of a weight, or of the KV of a layer, at most
CONTEXTS = (256, 1024)  # tokens of the longest row, for attention; the shortest has half
TOKENS = 16384  # of all rows together, beyond which only the shorter context is measured
PAGE = 16  # tokens
ERROR = 4  # spacings of the dtype: each rounding of a candidate may fall on the other side of the default's

Launch = Callable[[int, Cut], tuple[Tensor, ...]]  # launch number n, by a cut; its results


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Something to launch `count` times in a row, each time over other memory."""

    launch: Launch
    count: int


@contextmanager
def measuring(model: Model, work: Work) -> Iterator[Measure]:
    """A `Measure` of one kernel of this model's steps. Raises `Unfit` where the default cannot run. Its memory is given back at the end."""
    with torch.no_grad(), torch.cuda.device(model.device):
        try:
            settings = _attention(model, work) if work.form == "attend" else [_product(model, work)]
            wanted = [_launched(setting, ()) for setting in settings]
        except torch.OutOfMemoryError as error:
            raise Unfit("no memory for it") from error

        def measure(cut: Cut) -> Times:
            return tuple(_time(model, setting, want, cut) for setting, want in zip(settings, wanted, strict=True))

        try:
            yield measure
        finally:
            del settings, wanted, measure
            torch.cuda.empty_cache()


def _launched(setting: Setting, cut: Cut) -> tuple[Tensor, ...]:
    """The results of a cut, of the last launch: it meets what others have left behind. Raises `Unfit` where there is no such kernel."""
    try:
        for number in range(setting.count):  # all of them: nothing may be compiled or loaded while a graph is captured
            setting.launch(number, cut)
        results = setting.launch(0, cut)
        torch.cuda.synchronize()
    except (*kernel_errors(), CutError, RuntimeError) as error:
        torch.cuda.synchronize()  # raises again where the GPU itself has failed: then nothing more can be measured
        raise Unfit(f"no kernel: {' '.join(str(error).split())[:200]}") from error
    return results


def _time(model: Model, setting: Setting, want: tuple[Tensor, ...], cut: Cut) -> float:
    """Median microseconds of a launch. Raises `Unfit` for a kernel that computes something else than the default."""
    for mine, theirs in zip(_launched(setting, cut), want, strict=True):
        wrong = float(relative_error(mine, theirs.double(), theirs.double()))
        if not wrong <= ERROR * torch.finfo(model.dtype).eps:
            raise Unfit(f"wrong by {wrong:.2g}")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(setting.count):
            setting.launch(number, cut)
    return 1e3 * _median_ms(graph.replay) / setting.count


def _median_ms(replay: Callable[[], object]) -> float:
    """Median milliseconds of a replay."""
    times = []
    for number in range(REPEATS + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        replay()
        end.record()
        end.synchronize()
        if number >= 3:
            times.append(start.elapsed_time(end))
    return median(times)


def _copies(num_bytes: int, device: torch.device) -> int:
    """How many pieces of memory of this size are twice what the GPU's cache holds."""
    cached = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(COPIES, math.ceil(2 * cached / num_bytes)))


def _product(model: Model, work: Work) -> Setting:
    """The product with the model's own weights, one layer after another, and copies of them where they would fit into a cache."""
    params, eps, device = model.params, model.config.rms_norm_eps, model.device
    if work.part == "head":
        weight = params.embed if params.head is None else params.head
        triples: list[tuple[Tensor, Tensor | None, Tensor]] = [(weight, None, params.final_norm)]
    else:
        gain = "input_norm" if work.part in ("qkv", "down") else "post_norm"  # behind `down` stands the next layer's
        triples = [(getattr(w, work.part), getattr(w, f"{work.part}_bias"), getattr(w, gain)) for w in params.layers]
    needed, own = _copies(triples[0][0].numel() * triples[0][0].element_size(), device), len(triples)
    triples += [(triples[n % own][0].clone(), *triples[n % own][1:]) for n in range(max(0, needed - own))]
    x = _random(model, work.rows, work.width)
    residual = _random(model, work.rows, work.outputs) if work.part in ("o", "down") else None

    def launch(number: int, cut: Cut) -> tuple[Tensor, ...]:
        weight, bias, gain = triples[number % len(triples)]
        if work.form == "sum":
            assert residual is not None
            return linear_add_norm(x, weight, bias, residual, gain, eps, cut=cut)
        norm = gain if work.norm else None
        return (norm_linear(x, weight, gain=norm, bias=bias, residual=residual, eps=eps, gated=work.gated, cut=cut),)

    return Setting(launch=launch, count=max(LAUNCHES, len(triples)))


def _attention(model: Model, work: Work) -> list[Setting]:
    """Attention over each of the contexts that so many rows leave room for, in other layers' pages every time."""
    return [_attention_over(model, work, most) for most in CONTEXTS if most == CONTEXTS[0] or most * work.rows <= TOKENS]


def _attention_over(model: Model, work: Work, most: int) -> Setting:
    config, device, rows = model.config, model.device, work.rows
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    lens = torch.linspace(most, most // 2, rows, device=device).round().int()
    width = -(-most // PAGE)
    tables = torch.randperm(rows * width, device=device).view(rows, width).int()
    last = lens - 1
    slots = (tables[torch.arange(rows, device=device), (last // PAGE).long()] * PAGE + last % PAGE).int()
    layer_bytes = 4 * rows * width * PAGE * kv_heads * head_dim
    layers = _copies(layer_bytes, device)
    pages = torch.randn(layers, rows * width, 2, kv_heads, PAGE, head_dim, dtype=model.dtype, device=device)
    w = model.params.layers[0]
    qkv = _random(model, rows, (heads + 2 * kv_heads) * head_dim)
    angles = torch.rand(rows, 1, head_dim // 2, device=device) * 6
    cos, sin = torch.cat((angles.cos(),) * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1)
    plans: dict[Cut, FusedDecodePlan] = {}

    def launch(number: int, cut: Cut) -> tuple[Tensor, ...]:
        if cut not in plans:
            plans.clear()  # one at a time: what it replaces is not captured any more
            plans[cut] = FusedDecodePlan(rows, heads, kv_heads, head_dim, device, cut)
        place, eps = number % layers, config.rms_norm_eps
        return (
            rope_attend(
                qkv, w.q_norm, w.k_norm, cos, sin, pages, place, tables, lens, slots, head_dim**-0.5, eps, plans[cut].handle
            ),
        )  # fmt: skip

    return Setting(launch=launch, count=max(LAUNCHES, layers))


def _random(model: Model, rows: int, width: int) -> Float[Tensor, "rows width"]:
    return torch.randn(rows, width, dtype=model.dtype, device=model.device)
