"""How many bytes are left for KV: the device's free memory less the memory of the largest steps, measured before the KV pool is made."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import torch

from nanovllm.config import EngineConfig
from nanovllm.executor.attention_plans import Attention, own_plans, workspace_of
from nanovllm.executor.batch import EXTENSION, aligned, sample_prompts, to_device
from nanovllm.executor.compiled import all_fused, fused_forward
from nanovllm.executor.device_memory import room
from nanovllm.executor.prompt_graphs import logits_bytes, prompt_kinds
from nanovllm.models.common.params import two_of_each
from nanovllm.models.fast.choice import FastChoice
from nanovllm.models.fast.cuts import Cuts
from nanovllm.models.model import Model
from nanovllm.sampling.penalty_tables import PenaltyTables, draw_rows
from nanovllm.sampling.row_options import KINDS, LINES, Kind, pack, row_options
from nanovllm.state.kv_cache import init_kv, stored_dtype

GRAPHS = 576 << 20  # bytes for later: captured graphs, with cuBLAS workspaces of their own, and kernels that are loaded when they first run
CPU_KV_BYTES = 4 << 30  # the default on a CPU


@torch.no_grad()
def measured(model: Model, limits: EngineConfig, choice: FastChoice | None, cuts: Cuts | None, kinds: Seq[Kind] = KINDS) -> int:
    """Run the largest steps and return the most bytes that they hold at once, with room for captured graphs.

    The steps are a full prefill, of which captured prompts hold a part for good, and sampling for the most rows of a captured step, whose
    captured form holds as much once more, next to the tables of penalties and biases. Two layers of each form run, since a layer's memory
    is reused by the next one. If some layers have a sliding window, all of them run.

    Raises:
        torch.OutOfMemoryError: A step does not fit.
        AttentionUnavailableError: FlashInfer cannot serve the model on this machine.
    """
    with torch.cuda.device(model.device):
        prompts = _held(model.device, lambda: _prompts(model, limits, choice, cuts))
        draws, tables = _sampling(model, limits, kinds)
        torch.cuda.empty_cache()  # the tables' memory is in the sum, and must not be missing from the free memory too
        graphs = prompt_kinds(model, limits, choice)
        captured = max([kind.tokens for kind in graphs], default=0)
        for_good = prompts * captured // limits.max_num_batched_tokens + logits_bytes(graphs, model) + draws + tables + GRAPHS
        return max(prompts, draws) + for_good


def _held(device: torch.device, call: Callable[[], object]) -> int:
    """The most bytes that a call holds in addition to those held before."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    most = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    return most - before


def _prompts(model: Model, limits: EngineConfig, choice: FastChoice | None, cuts: Cuts | None) -> None:
    """Run a step full of prompt tokens, on empty pages."""
    small = replace(limits, num_pages=1, num_frames=min(1, limits.num_frames))
    served = all_fused(model, choice)
    forward = fused_forward(model, choice, cuts) if served else model.spec.forward
    # Our own kernels attend where they can: FlashInfer's may not be built yet, and hold no more than their workspace.
    attention = None if served or small.kv_dtype else Attention(model, small, None)  # no rows share pages
    workspace = workspace_of(model, small) if served and not small.kv_dtype else None  # only takes its memory
    where = {"page_size": small.page_size, "dtype": stored_dtype(small, model.dtype), "device": model.device}
    kv = init_kv(model.config, num_pages=1, num_frames=small.num_frames or None, **where)
    rows = -(-small.max_num_batched_tokens // small.max_model_len)
    for host in sample_prompts(small, [(rows, small.max_num_batched_tokens // rows)], model.config):
        own = own_plans(model, host)  # its handles are valid while it lives
        plan, windowed = own.handles if attention is None else attention.plan_prompt(host, together=False)
        params = model.params if model.config.windows else two_of_each(model.params)
        forward(params, kv, to_device(host, model.device, plan, windowed), model.config)
    del workspace


def _sampling(model: Model, limits: EngineConfig, kinds: Seq[Kind]) -> tuple[int, int]:
    """The most bytes that sampling holds at once, and the bytes of the tables of penalties and biases."""
    tables = PenaltyTables.empty(limits.max_num_seqs, model.config.vocab_size, model.device)
    return _held(model.device, lambda: _draw(model, limits, tables, kinds)), tables.num_bytes


def _draw(model: Model, limits: EngineConfig, tables: PenaltyTables, kinds: Seq[Kind]) -> None:
    """Sample for as many rows as may run at once: sequences, or tokens of short prompts."""
    rows = max(limits.max_num_seqs, EXTENSION)
    host = np.zeros((LINES, aligned(rows)), np.int32)
    pack([], host)
    options, ones = row_options(torch.from_numpy(host).to(model.device), rows), torch.ones(rows, dtype=torch.int32, device=model.device)
    logits = torch.zeros(rows, model.config.vocab_size, dtype=model.dtype, device=model.device)
    for kind in kinds:
        draw_rows(kind, logits, options, tables, ones, ones)


def device_budget(model: Model, memory_fraction: float) -> int:
    """Bytes that may be allocated in addition to those allocated now."""
    if model.device.type != "cuda":
        return CPU_KV_BYTES
    memory = room(model.device)
    assert memory is not None
    return int(memory.total * memory_fraction) - (memory.total - memory.free)
