"""How many bytes are left for KV: the device's free memory less the memory of the largest steps, measured before the KV pool is made."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from nanovllm.config import EngineConfig
from nanovllm.executor.attention_plans import Attention, own_plans, workspace_of
from nanovllm.executor.batch import sample_prompts, to_device
from nanovllm.executor.compiled import all_fused, fused_forward
from nanovllm.executor.device_memory import room
from nanovllm.executor.prompt_graphs import captures_prompts, logits_bytes, prompt_kinds
from nanovllm.models.common.params import two_of_each
from nanovllm.models.fast.choice import FastChoice
from nanovllm.models.fast.cuts import Cuts
from nanovllm.models.model import Model
from nanovllm.sampling import sampler, tensors
from nanovllm.sampling.params import SamplingParams
from nanovllm.state.kv_cache import init_kv

GRAPHS = 576 << 20  # bytes for later: captured graphs, with cuBLAS workspaces of their own, and kernels that are loaded when they first run
FILTERED = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1)  # the sampling that needs the most memory
CPU_KV_BYTES = 4 << 30  # the default on a CPU


@torch.no_grad()
def measured(model: Model, limits: EngineConfig, choice: FastChoice | None, cuts: Cuts | None) -> int:
    """Run the largest steps and return the most bytes that they hold at once, with room for captured graphs.

    The steps are a full prefill, of which captured prompts hold a part for good, and sampling for `max_num_seqs` rows. Two layers of each
    form run, since a layer's memory is reused by the next one. If some layers have a sliding window, all of them run.

    Raises:
        torch.OutOfMemoryError: A step does not fit.
        AttentionUnavailableError: FlashInfer cannot serve the model on this machine.
    """
    with torch.cuda.device(model.device):
        held = _held(model.device, lambda: _prompts(model, limits, choice, cuts)), _held(model.device, lambda: _draw(model, limits))
        kinds = prompt_kinds(model, limits) if captures_prompts(model, choice) else []
        captured = max([kind.tokens for kind in kinds], default=0)
        return max(held) + held[0] * captured // limits.max_num_batched_tokens + logits_bytes(kinds, model) + GRAPHS


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
    attention = None if served else Attention(model, small, None)  # no rows share pages
    workspace = workspace_of(model, small) if served else None  # only takes its memory
    where = {"page_size": small.page_size, "dtype": model.dtype, "device": model.device}
    kv = init_kv(model.config, num_pages=1, num_frames=small.num_frames or None, **where)
    rows = -(-small.max_num_batched_tokens // small.max_model_len)
    for host in sample_prompts(small, [(rows, small.max_num_batched_tokens // rows)], model.config):
        own = own_plans(model, host)  # its handles are valid while it lives
        plan, windowed = own.handles if attention is None else attention.plan_prompt(host, together=False)
        params = model.params if model.config.windows else two_of_each(model.params)
        forward(params, kv, to_device(host, model.device, plan, windowed), model.config)
    del workspace


def _draw(model: Model, limits: EngineConfig) -> None:
    """Sample for as many rows as may run at once."""
    row: tensors.Row = (FILTERED, 0, tensors.NO_IDS, tensors.NO_IDS)
    sampling = tensors.build([row] * limits.max_num_seqs, model.config.vocab_size, model.device)
    logits = torch.zeros(limits.max_num_seqs, model.config.vocab_size, dtype=model.dtype, device=model.device)
    positions = torch.from_numpy(np.ones(limits.max_num_seqs, np.int32)).to(model.device)
    sampler.sample(logits, sampling, positions)


def device_budget(model: Model, memory_fraction: float) -> int:
    """Bytes that may be allocated in addition to those allocated now."""
    if model.device.type != "cuda":
        return CPU_KV_BYTES
    memory = room(model.device)
    assert memory is not None
    return int(memory.total * memory_fraction) - (memory.total - memory.free)
