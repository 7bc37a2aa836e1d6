"""Builds the carry of decode steps from sequences, and brings the results of a step to the host."""

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import torch
from torch.utils import _pytree as pytree

from nanovllm.config import ModelConfig
from nanovllm.executor.batch import HostBatch, to_device
from nanovllm.executor.decode_carry import DecodeCarry, DecodeOutput
from nanovllm.executor.executor import Drawn, Forward, Masks
from nanovllm.executor.row_processing import kept, process_rows, processors_of
from nanovllm.models.common.batch import Batch
from nanovllm.models.model import Model
from nanovllm.ops.sampling.draw_parts import parts_of
from nanovllm.sampling import sampler, tensors
from nanovllm.sampling.compiled_grammar import num_words
from nanovllm.sampling.process_logits import Processing
from nanovllm.state.kv_cache import KVState
from nanovllm.state.request import Sequence
from nanovllm.types import Tensor


def decode_carry(
    model: Model, kv: KVState, rows: Seq[Sequence], host: HostBatch, plan: int = 0, windowed_plan: int | None = None
) -> DecodeCarry:
    """Return a carry over new tensors.

    Args:
        model: The model.
        kv: The KV memory.
        rows: The sequences.
        host: Their decode batch.
        plan: The handle of the attention plan.
        windowed_plan: The handle for layers with a sliding window. None: `plan` serves all layers.
    """
    return DecodeCarry(
        kv=kv,
        batch=to_device(host, model.device, plan, plan if windowed_plan is None else windowed_plan),
        sampling=sampling_of(rows, model),
        active=torch.ones(len(rows), dtype=torch.int32, device=model.device),
    )


def for_a_session(carry: DecodeCarry, forward: Forward | None) -> DecodeCarry:
    """The carry with the model function of its engine, and with tensors that have memory of their own.

    `to_device` gives views of one buffer. A compiled step would be compiled anew for their offsets.
    """
    return replace(carry, batch=_own(carry.batch), prompt=None if carry.prompt is None else _own(carry.prompt), forward=forward)


def _own(batch: Batch) -> Batch:
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)


def with_static_addresses(carry: DecodeCarry) -> DecodeCarry:
    """The same carry, whose tensors `torch.compile` may treat as memory that stays where it is.

    With `mode="reduce-overhead"` a compiled step writes them in place, inside of its CUDA graph, and copies none of them.
    """
    if carry.active.is_cuda:
        for tensor in pytree.tree_leaves(carry):
            if isinstance(tensor, Tensor):
                torch._dynamo.mark_static_address(tensor, guard=False)  # other sessions have other addresses
    return carry


def sampling_rows(rows: Seq[Sequence]) -> list[tensors.Row]:
    """The rows that `tensors.build` takes. They have token ids only if the sequence's options include penalties."""

    def row(s: Sequence) -> tensors.Row:
        params, prompt, drawn = s.request.sampling, tensors.NO_IDS, tensors.NO_IDS
        if tensors.penalises(params):
            prompt, drawn = s.tokens.array(0, s.request.num_prompt), s.tokens.array(s.request.num_prompt)
        return params, s.request.seed, prompt, drawn

    return [row(s) for s in rows]


def sampling_of(rows: Seq[Sequence], model: Model) -> tensors.Sampling:
    """The sampling tensors of these sequences in their present state."""
    return tensors.build(sampling_rows(rows), model.config.vocab_size, model.device)


def draw_first(
    logits: Tensor, rows: Seq[tuple[Sequence, int]], model: Model, config: ModelConfig, width: int, masks: Masks | None = None
) -> Drawn | None:
    """Sample the first token of the sequences whose last prompt token was run; None if there are none.

    The logits are those of the model's function with `config`. Processors get the tokens in a table of `width` columns.
    """
    whole = [s for s, count in rows if count == s.todo]
    if not whole:
        return None
    positions = torch.tensor([s.tokens.length for s in whole], dtype=torch.int32, device=logits.device)
    parts = parts_of(config)
    if parts is not None and processors_of(whole):
        logits, parts = parts.whole(logits), None
    logits, processing = process_rows(logits, whole, width)
    sampling = with_masks(sampling_of(whole, model), masks, len(whole), model.config.vocab_size)
    return to_host(sampler.sample(logits, sampling, positions, parts), kept(processing))


def with_masks(sampling: tensors.Sampling, masks: Masks | None, rows: int, vocab_size: int) -> tensors.Sampling:
    """The options of a batch with the masks of its rows."""
    if masks is None:
        return sampling
    words = np.full((rows, num_words(vocab_size)), -1, np.int32)
    masks.fill(words, range(rows))
    return replace(sampling, allowed=torch.from_numpy(words).to(sampling.seeds.device))


def to_host(out: "DecodeOutput | sampler.Sampled", processing: tuple[Processing, ...] = ()) -> Drawn:
    """Wait for a step's results, and copy them to the host."""

    def fetch(tensor: Tensor | None) -> np.ndarray | None:
        return None if tensor is None else tensor.cpu().numpy()

    return Drawn(
        token_ids=out.token_ids.cpu().numpy(),
        logprobs=fetch(out.logprobs),
        top_ids=fetch(out.top_ids),
        top_logprobs=fetch(out.top_logprobs),
        processing=processing,
    )
