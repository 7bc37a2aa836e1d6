"""The decode step as a pure function. `DecodeCarry` holds everything that changes, so one step can follow another without the host.

You can call the step in a loop, capture it in a CUDA graph, or trace it in a larger program with `torch.compile(fullgraph=True)`.
"""

import reprlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from nanovllm import models
from nanovllm.config import ModelConfig
from nanovllm.errors import InvalidRequestError
from nanovllm.executor.decode_carry import DecodeCarry, DecodeOutput, TokenLog
from nanovllm.executor.fresh_carry import engine_of, note, require_carry, require_fresh, require_room
from nanovllm.ops.elementwise.decode_rows import next_places
from nanovllm.ops.sampling.draw_parts import parts_of
from nanovllm.sampling.process_logits import LogitsProcessor, TokensSoFar, mapped, process, require_arguments, require_logits
from nanovllm.sampling.sampler import Sampled, record, sample
from nanovllm.state.device_errors import watched
from nanovllm.state.kv_cache import KVState
from nanovllm.types import Int32, Int64, Tensor, brief, writable


def decode_step(
    params: Any,
    carry: DecodeCarry,
    config: ModelConfig,
    *,
    process_logits: Callable[[Tensor], Tensor] | None = None,
    token_ids: Int32[Tensor, "B"] | Int64[Tensor, "B"] | None = None,
    forward: Callable[..., tuple[Tensor, KVState]] | None = None,
) -> tuple[DecodeCarry, DecodeOutput]:
    """Donates `carry`. Run one token of every row, or the prompts of a session begun with `fill=False`, and sample the next one.

    The function traces with `torch.compile(fullgraph=True)` and copies no KV. Call all steps of an engine on one CUDA stream. Traced code
    does not check whether `carry` was donated before; `commit` finds it then.

    Args:
        params: The model's weights, `model.params`.
        carry: The carry that `begin` or the step before returned.
        config: The model's config, `model.config`.
        process_logits: A function from the logits `[B, V]` to the logits to sample from, such as a grammar mask. It runs after that of
            `begin`, which may take the tokens so far and carry tensors. None: the model's own.
        token_ids: Tokens to take instead of sampled ones, int32 or int64 `[B]`. Log-probabilities are then of these tokens, so this scores
            a given text.
        forward: The model function to run, with the signature of `nv.forward`. None: the function that the engine's own steps run, with the
            same kernels.

    Returns:
        The next carry, and the step's output.

    Raises:
        InvalidRequestError: `carry` is not a `DecodeCarry`, `params` are not `Params`, `process_logits` returns something else than logits
            of the same shape, or `token_ids` are not one integer for each row.
            If the step is not traced: a token id is not in the vocabulary (on a CPU; on a GPU the nearest one is taken), or the carry has
            seen `room` steps, so its rows have no pages for another one.
        DonatedStateError: The carry was donated to an earlier step, or committed.
        EngineDeadError: The device is broken. Traced code raises the error of torch.

    Examples:
        >>> state, carry = nv.begin(model, state, ["Once upon a time"], nv.SamplingParams(temperature=0), room=3)
        >>> for _ in range(3):
        ...     carry, out = nv.decode_step(model.params, carry, model.config)
        >>> state, (reply,) = nv.commit(model, state, carry)
        >>> reply.text
        ', a boy'
    """
    if torch.compiler.is_compiling():
        return _stepped(params, carry, config, process_logits, token_ids, forward)
    require_carry(carry)
    with watched(engine_of(carry.log)):
        return _stepped(params, carry, config, process_logits, token_ids, forward)


def _stepped(
    params: Any, carry: DecodeCarry, config: ModelConfig, process_logits: Any, token_ids: Tensor | None, forward: Callable[..., Any] | None
) -> tuple[DecodeCarry, DecodeOutput]:
    num_steps = None
    if not torch.compiler.is_compiling():
        _require_function(process_logits)
        if forward is None and not isinstance(params, models.Params):
            raise InvalidRequestError(f"params={reprlib.repr(params)} must be Params: pass model.params")
        if forward is None and not isinstance(config, ModelConfig):
            raise InvalidRequestError(f"config={reprlib.repr(config)} must be a ModelConfig: pass model.config")
        if carry.log is not None and (carry.log.lease is None or carry.log.lease.checked):
            num_steps = require_fresh(carry.log)
            require_room(carry.log, num_steps)
    if token_ids is not None:
        token_ids = tokens_for(carry, token_ids, config.vocab_size)
    run = forward or carry.forward or models.forward
    logits, kv = run(params, carry.kv, carry.batch if carry.prompt is None else carry.prompt, config)
    parts = parts_of(config)
    if parts is not None and (carry.processing or process_logits is not None or token_ids is not None):
        logits, parts = parts.whole(logits), None
    if carry.processing:
        carry, logits = _processed(carry, logits)
    if process_logits is not None:
        new = process_logits(logits) if torch.compiler.is_compiling() else _called(process_logits, logits)
        require_logits(process_logits, new, logits)
        logits = new
    seq_lens = carry.batch.seq_lens
    places = seq_lens if carry.sampling.temperature is None else seq_lens - 1 + carry.active  # greedy sampling does not read them
    sampled = sample(logits, carry.sampling, places, parts)
    if token_ids is not None:
        sampled = _forced(logits, sampled, token_ids)
    carry = advance(carry, kv, sampled)
    if num_steps is not None and carry.log is not None:
        note(carry.log, num_steps + 1)
    return carry, DecodeOutput(
        token_ids=sampled.token_ids,
        logprobs=sampled.logprobs,
        top_ids=sampled.top_ids,
        top_logprobs=sampled.top_logprobs,
        logits=logits,
    )


def tokens_for(carry: DecodeCarry, token_ids: Any, vocab_size: int) -> Int32[Tensor, "B"]:
    """A caller's token ids for the rows of a carry. Of ids beyond the vocabulary the nearest is taken where a check would wait.

    Raises:
        InvalidRequestError: They are not one integer for each row, on the carry's device; or, on a CPU, not in the vocabulary.
    """
    rows = carry.active.shape[0]
    if not isinstance(token_ids, Tensor) or token_ids.shape != (rows,) or token_ids.dtype not in (torch.int32, torch.int64):
        raise InvalidRequestError(f"token_ids={brief(token_ids)} must be a tensor of shape [{rows}], int32 or int64")
    if token_ids.device != carry.active.device:
        raise InvalidRequestError(f"token_ids={brief(token_ids)} must be on {carry.active.device}")
    if not torch.compiler.is_compiling() and not token_ids.is_cuda and not bool(((token_ids >= 0) & (token_ids < vocab_size)).all()):
        raise InvalidRequestError(f"token_ids={token_ids.tolist()} must be from 0 to {vocab_size - 1}")
    return token_ids.clamp(0, vocab_size - 1).int()


def _require_function(process_logits: Any) -> None:
    if isinstance(process_logits, LogitsProcessor) or not (process_logits is None or callable(process_logits)):
        raise InvalidRequestError(
            f"process_logits={reprlib.repr(process_logits)} must be a function of the logits alone: give begin(..., process_logits=...) a "
            "LogitsProcessor"
        )


def _called(process_logits: Callable[[Tensor], Any], logits: Tensor) -> Any:
    try:
        return process_logits(logits)
    except TypeError:
        require_arguments(process_logits, (1,))  # not before the call: to look at a signature takes longer than a launch
        raise


def _processed(carry: DecodeCarry, logits: Tensor) -> tuple[DecodeCarry, Tensor]:
    """Run the processors of the carry."""
    assert carry.token_ids is not None
    before = carry.processing
    logits, after = process(logits, TokensSoFar(token_ids=carry.token_ids, lengths=carry.batch.seq_lens), before)
    carried = [one.carried for one in after]
    if any(one.processor.init is not None for one in before) and written_in_place(logits):
        # Functions may exchange the tensors that they carry, or return one of them as logits. All are read before one is written.
        carried, logits = [mapped(torch.clone, each) for each in carried], logits.clone()
    carried = [mapped(donated, old.carried, new) for old, new in zip(before, carried, strict=True)]
    return replace(carry, processing=tuple(replace(old, carried=new) for old, new in zip(before, carried, strict=True))), logits


def advance(carry: DecodeCarry, kv: KVState, sampled: Sampled) -> DecodeCarry:
    """Return the carry of the next step, which runs the sampled tokens.

    A token beyond the end of its row's page table is written to the dummy page, and attends to the pages in the table.
    """
    batch, token_ids, log = carry.batch, sampled.token_ids, carry.log
    if log is not None:  # a row that has stopped runs its last token again, so that its KV stays as it is
        log = _write(log, sampled, carry.active > 0)
        token_ids = torch.where(carry.active > 0, token_ids, batch.input_ids)
    table = carry.token_ids
    if table is not None:
        last = (batch.seq_lens.long().unsqueeze(1)).clamp(max=table.shape[1] - 1)
        table = writable(table).scatter_(1, last, token_ids.unsqueeze(1))
    num_pages, page_size = kv.pools[0].shape[1], kv.pools[0].shape[4]
    places = batch.positions, batch.seq_lens
    positions, slots, seq_lens = next_places(*places, batch.page_tables, carry.active, num_pages, page_size)
    windowed = batch.windowed
    if windowed is not None:
        _, frame_slots, _ = next_places(*places, windowed.page_tables, carry.active, kv.pools[1].shape[1], page_size)
        windowed = replace(windowed, slots=donated(windowed.slots, frame_slots))
    return replace(
        carry,
        kv=kv,
        batch=replace(
            batch,
            input_ids=donated(batch.input_ids, token_ids),
            positions=donated(batch.positions, positions),
            slots=donated(batch.slots, slots),
            seq_lens=donated(batch.seq_lens, seq_lens),
            windowed=windowed,
        ),
        sampling=record(carry.sampling, token_ids),
        token_ids=table,
        prompt=None,
        log=log,
    )


def donated(old: Tensor, new: Tensor) -> Tensor:
    """The new value of a tensor of a carry. In traced code on a GPU it is written into the memory of the old value.

    So the tensors of a carry keep their addresses, and a compiled step can be replayed as a CUDA graph (`mode="reduce-overhead"`).
    """
    return old.copy_(new) if written_in_place(old) else new


def written_in_place(tensor: Tensor) -> bool:
    """Whether a step writes a tensor of a carry on this tensor's device in place."""
    return torch.compiler.is_compiling() and tensor.is_cuda


def _write(log: TokenLog, sampled: Sampled, active: Tensor) -> TokenLog:
    here = torch.arange(log.token_ids.shape[1], device=log.token_ids.device) == log.num_steps
    token_ids = torch.where(active, sampled.token_ids, -1).unsqueeze(1)
    logprobs = log.logprobs
    if logprobs is not None and sampled.logprobs is not None:
        logprobs = donated(logprobs, torch.where(here, sampled.logprobs.unsqueeze(1), logprobs))
    return TokenLog(
        session=log.session,
        token_ids=donated(log.token_ids, torch.where(here, token_ids, log.token_ids)),
        logprobs=logprobs,
        branches=log.branches,
        ran=log.ran.add_(1),
        num_steps=donated(log.num_steps, log.num_steps + 1),
        lease=log.lease,
    )


def _forced(logits: Tensor, sampled: Sampled, token_ids: Tensor) -> Sampled:
    logprobs = logits.float().log_softmax(-1).gather(1, token_ids.long().unsqueeze(1)).squeeze(1)
    return replace(sampled, token_ids=token_ids.to(torch.int32), logprobs=logprobs)
