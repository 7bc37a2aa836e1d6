"""What the largest steps of an engine hold on a GPU beside weights and KV: measured by running them, before the pool takes what is left."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from nanovllm.config import EngineConfig
from nanovllm.executor.attention_plans import Attention
from nanovllm.executor.batch import to_device
from nanovllm.executor.executor import fused_forward, sample_prompts
from nanovllm.loading.load_model import Model
from nanovllm.models.common.params import two_of_each
from nanovllm.models.fast import fused
from nanovllm.models.fast.choice import FastChoice
from nanovllm.models.fast.cuts import Cuts
from nanovllm.sampling import sampler as sample
from nanovllm.sampling.params import SamplingParams
from nanovllm.state.kv_cache import init_kv

GRAPHS = 512 << 20  # bytes for what comes later: captured graphs, kernels that are loaded when they first run
FILTERED = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1)  # draws that hold the most


@torch.no_grad()
def measured(model: Model, limits: EngineConfig, choice: FastChoice | None, cuts: Cuts | None) -> int:
    """Bytes: the most that a step full of prompt tokens, or a draw for `max_num_seqs` rows, holds at once, and room for captured graphs.

    Two layers of each form run, or all where some have windows, for a layer's memory is used again by the next. Raises
    `torch.OutOfMemoryError` where a step does not fit, and `AttentionUnavailableError`.
    """
    with torch.cuda.device(model.device):
        held = _held(model.device, lambda: _prompts(model, limits, choice, cuts)), _held(model.device, lambda: _draw(model, limits))
        return max(held) + GRAPHS


def _held(device: torch.device, call: Callable[[], object]) -> int:
    """The most bytes that a call holds, beyond what was held before."""
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
    """A step full of prompt tokens, on pages that hold nothing."""
    small = replace(limits, num_pages=1, num_frames=min(1, limits.num_frames))
    served = fused.serves(model.params, model.config) and (choice is None or choice.all_layers)
    forward = fused_forward(model, choice, cuts) if served else model.spec.forward
    attention = Attention(model, small, None)  # no rows share what is worth reading once
    where = {"page_size": small.page_size, "dtype": model.dtype, "device": model.device}
    kv = init_kv(model.config, num_pages=1, num_frames=small.num_frames or None, **where)
    rows = -(-small.max_num_batched_tokens // small.max_model_len)
    for host in sample_prompts(small, [(rows, small.max_num_batched_tokens // rows)], model.config):
        plan, windowed = attention.plan_prompt(host, together=served)
        params = model.params if model.config.windows else two_of_each(model.params)
        forward(params, kv, to_device(host, model.device, plan, windowed), model.config)


def _draw(model: Model, limits: EngineConfig) -> None:
    """A draw for as many rows as may run at once."""
    row: sample.Row = (FILTERED, 0, sample.NO_IDS, sample.NO_IDS)
    sampling = sample.build([row] * limits.max_num_seqs, model.config.vocab_size, model.device)
    logits = torch.zeros(limits.max_num_seqs, model.config.vocab_size, dtype=model.dtype, device=model.device)
    positions = torch.from_numpy(np.ones(limits.max_num_seqs, np.int32)).to(model.device)
    sample.sample(logits, sampling, positions)
