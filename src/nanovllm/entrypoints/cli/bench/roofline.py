"""The roofline of a workload: the bytes and products that it needs at least, over the speed of the device, which is measured.

The model is Williams et al., "Roofline" (2009). A step cannot be faster than reading its bytes, nor faster than its arithmetic. Of several
ranks each reads and multiplies its part at the same time, so their figures are those of one rank: the config and the weights are its own.
The time in which ranks exchange sums is not part of it.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import torch
from torch.utils import _pytree as pytree

from nanovllm.config import ModelConfig
from nanovllm.models.common.params import ParamInfo, Params
from nanovllm.models.registry import REGISTRY
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.state.kv_cache import bytes_per_page
from nanovllm.types import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The least work of a workload, if all rows run in one batch and KV that rows share is read once per step.

    Attributes:
        steps: Decode steps.
        tokens: Tokens that the decode steps sample, summed over the steps.
        kv_tokens: Tokens whose KV the decode steps read, summed over the steps.
        prompt_tokens: Prompt tokens that run through the layers.
        pairs: Pairs of a query and a key in the prompts.
        found_tokens: Prompt tokens whose KV is already cached.
        num_prompts: Prompts. Each samples one token.
    """

    steps: int = 0
    tokens: int = 0
    kv_tokens: int = 0
    prompt_tokens: int = 0
    pairs: int = 0
    found_tokens: int = 0
    num_prompts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """The measured speed of a device.

    Attributes:
        read_bytes: Bytes read per second.
        flops: Floating-point operations per second in a matrix product of the model's dtype.
    """

    read_bytes: float
    flops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """Bytes of a model's matrices and KV as they are in memory; a quantised matrix takes the bytes of its codes, scales and zeros.

    Attributes:
        dense: Matrices that every token is multiplied with, without the head.
        experts: Matrices of all experts.
        head: The output matrix, which may be the embedding table.
        token: Keys and values of one token over all layers.
    """

    dense: int
    experts: int
    head: int
    token: int


def held_bytes(params: Params[Tensor], config: ModelConfig, kv_dtype: torch.dtype) -> HeldBytes:
    """The bytes of a model's matrices, and of its KV in the dtype of an engine's pools. Matrices of experts have three axes."""
    table = REGISTRY[config.architecture].param_table(config)
    infos, held = pytree.tree_leaves(table.layers), _leaves(params.layers)
    matrices = [own for info, own in zip(infos, held, strict=True) if isinstance(info, ParamInfo) and info.kind == "matrix"]
    dense, experts = (sum(own.nbytes for own in matrices if (len(own.shape) == 3) == yes) for yes in (False, True))
    head = (params.embed if params.head is None else params.head).nbytes
    return HeldBytes(dense=dense, experts=experts, head=head, token=token_bytes(config, kv_dtype))


def _leaves(tree: object) -> list[Any]:
    return pytree.tree_leaves(tree, is_leaf=lambda leaf: isinstance(leaf, QuantisedMatrix))


def decode_work(prompt_lens: Sequence[int], counts: Sequence[int], shared: int = 0) -> Work:
    """The work of the decode steps for replies of `counts[i]` tokens after prompts of `prompt_lens[i]` tokens.

    Decode steps sample all tokens of a reply but the first. The first `shared` tokens are the same in all prompts.
    """
    steps = max(counts) - 1
    own = sum((count - 1) * (length - shared) + count * (count - 1) // 2 for length, count in zip(prompt_lens, counts, strict=True))
    return Work(steps=steps, tokens=sum(counts) - len(counts), kv_tokens=shared * steps + own)


def prompt_work(prompt_lens: Sequence[int], found: int = 0) -> Work:
    """The work of prompts up to their first token. The first `found` tokens are the same in all prompts, and their KV is cached."""
    return Work(
        prompt_tokens=sum(length - found for length in prompt_lens),
        pairs=sum((length * (length + 1) - found * (found + 1)) // 2 for length in prompt_lens),
        found_tokens=found,
        num_prompts=len(prompt_lens),
    )


def prompts_and_decode(prompt_lens: Sequence[int], counts: Sequence[int], shared: int = 0, *, fill: bool = False) -> Work:
    """The work of prompts, then of decode steps. The KV of the first `shared` tokens is cached, or with `fill` runs once."""
    before, steps = prompt_work(prompt_lens, shared), decode_work(prompt_lens, counts, shared)
    if fill:
        once = prompt_work([shared])
        before = replace(before, prompt_tokens=before.prompt_tokens + shared, pairs=before.pairs + once.pairs)
    return replace(before, steps=steps.steps, tokens=steps.tokens, kv_tokens=steps.kv_tokens)


def together(works: Sequence[Work]) -> Work:
    """The work of several workloads whose rows run in one batch."""
    sums = {field.name: sum(getattr(work, field.name) for work in works) for field in fields(Work)}
    return Work(**{**sums, "steps": max(work.steps for work in works)})


def step_bytes(
    config: ModelConfig, dtype: torch.dtype, rows: int, context: "int | float", shared: int = 0, held: HeldBytes | None = None
) -> int:
    """Bytes that one decode step must read: all layer matrices, the head, and the KV of `rows` rows of `context` tokens each.

    `shared` of these tokens are the same for all rows. Norm weights, embedding rows and written bytes are not counted. `held` are the bytes
    of the matrices and the KV; None if all are in `dtype`.
    """
    return weight_bytes(config, dtype, rows, held) + round((shared + rows * (context - shared)) * token_bytes(config, dtype, held))


def decode_bytes(config: ModelConfig, dtype: torch.dtype, work: Work, held: HeldBytes | None = None) -> int:
    """Bytes that the decode steps of a workload must read together. `held` is as in `step_bytes`."""
    rows = work.tokens / max(1, work.steps)
    return work.steps * weight_bytes(config, dtype, rows, held) + work.kv_tokens * token_bytes(config, dtype, held)


def prompt_bytes(config: ModelConfig, dtype: torch.dtype, work: Work, held: HeldBytes | None = None) -> int:
    """Bytes that the prompts of a workload must read. `held` is as in `step_bytes`."""
    weights = weight_bytes(config, dtype, work.prompt_tokens, held) * (work.num_prompts > 0)
    return weights + work.found_tokens * token_bytes(config, dtype, held)


def limit_seconds(config: ModelConfig, dtype: torch.dtype, work: Work, ceiling: Ceiling, held: HeldBytes | None = None) -> float:
    """The least time of a workload: for decode steps and for prompts, the longer of reading time and arithmetic time.

    `held` is as in `step_bytes`. Products are counted in `dtype`, because activations are not quantised.
    """
    layers, head = num_weights(config, 0)
    steps = max(decode_bytes(config, dtype, work, held) / ceiling.read_bytes, 2 * (layers + head) * work.tokens / ceiling.flops)
    products = 2 * layers * work.prompt_tokens + 2 * head * work.num_prompts
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * work.pairs
    return steps + max(prompt_bytes(config, dtype, work, held) / ceiling.read_bytes, (products + attention) / ceiling.flops)


def num_weights(config: ModelConfig, tokens: "int | float") -> tuple[int, int]:
    """The number of elements of the layers' matrices that a step of `tokens` tokens reads, and of the head.

    Of E experts, a step reads `E (1 - (1 - k/E)^tokens)`, if each token chooses k of them at random. With `tokens=0`, the experts of one
    token count: these are the elements that one token is multiplied with. The head may be the embedding table.
    """
    table = REGISTRY[config.architecture].param_table(config)
    matrices = [info for info in pytree.tree_leaves(table.layers) if isinstance(info, ParamInfo) and info.kind == "matrix"]
    dense, routed = (sum(math.prod(info.shape) for info in matrices if (len(info.shape) == 3) == yes) for yes in (False, True))
    ranks = 1 if config.mesh is None else config.mesh.size
    return round(dense + routed * _read_experts(config, tokens)), -(-config.vocab_size // ranks) * config.hidden_size


def _read_experts(config: ModelConfig, tokens: "int | float") -> float:
    """The share of the experts that a step of `tokens` tokens reads."""
    share = 1.0 if config.moe is None else config.moe.top_k / config.moe.num_experts
    return 1 - (1 - share) ** max(1.0, tokens)


def weight_bytes(config: ModelConfig, dtype: torch.dtype, tokens: "int | float" = math.inf, held: HeldBytes | None = None) -> int:
    """Bytes of the layer matrices and the head that a step of `tokens` tokens reads. `held` is as in `step_bytes`."""
    if held is not None:
        return round(held.dense + held.experts * _read_experts(config, tokens)) + held.head
    return sum(num_weights(config, tokens)) * dtype.itemsize


def token_bytes(config: ModelConfig, dtype: torch.dtype, held: HeldBytes | None = None) -> int:
    """Bytes of one token's KV over all layers. `held` is as in `step_bytes`."""
    return held.token if held is not None else bytes_per_page(config, page_size=1, dtype=dtype)


def measure_ceiling(device: torch.device, dtype: torch.dtype) -> Ceiling:
    """Measure the speed of a device: sum and copy a large tensor, and multiply large matrices. The fastest run of each counts.

    It takes less than a second, and on a GPU up to 4 GiB of memory, which is freed at the end.
    """
    cuda = device.type == "cuda"
    elements, side, repeats = (min(1 << 29, torch.cuda.mem_get_info(device)[0] // 16), 8192, 12) if cuda else (1 << 25, 768, 5)
    source = torch.ones(elements, device=device)
    target = torch.empty_like(source)
    a, b = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    size = elements * source.element_size()
    summed = _best(source.sum, device, repeats)
    copied = _best(lambda: target.copy_(source), device, repeats)
    multiplied = _best(lambda: a @ b, device, repeats)
    del source, target, a, b
    if cuda:
        torch.cuda.empty_cache()  # so that an engine's pool can take the memory
    return Ceiling(read_bytes=max(size / summed, 2 * size / copied), flops=2 * side**3 / multiplied)


@torch.no_grad()
def _best(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of the fastest call, by the device's own clock on a GPU."""
    call()
    if device.type != "cuda":
        return min(_seconds(call) for _ in range(repeats))
    with torch.cuda.device(device):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        marks[0].record()
        for mark in marks[1:]:
            call()
            mark.record()
        torch.cuda.synchronize(device)
        return min(before.elapsed_time(after) for before, after in pairwise(marks)) / 1e3


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
