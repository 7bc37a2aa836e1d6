"""The decode step as a pure function: all that changes is in `DecodeCarry`, so steps follow each other without the host.

It can stand in a loop, in a CUDA graph, or in somebody's larger program under `torch.compile(fullgraph=True)`.
"""

import reprlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from nanovllm import models
from nanovllm.config import ModelConfig
from nanovllm.errors import DonatedStateError, InvalidRequestError
from nanovllm.models.common.batch import Batch
from nanovllm.ops.elementwise.decode_rows import next_places
from nanovllm.sampling.sampler import Sampled, record, sample
from nanovllm.sampling.tensors import Sampling
from nanovllm.state.kv_cache import KVState
from nanovllm.types import Float, Float32, Int32, Int64, Tensor, brief, brief_fields, register_value


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLog:
    """The tokens drawn since `begin`, `token_ids[:, :num_steps]`, and their log-probabilities where they were asked for.

    `session` is the ticket by which `commit` finds the reserved pages. `ran` counts, in place, the steps run from any carry of the session:
    a carry whose `num_steps` differs was donated to another step, or committed.
    """

    session: Int64[Tensor, ""]
    ran: Int32[Tensor, ""]
    num_steps: Int32[Tensor, ""]
    token_ids: Int32[Tensor, "B room"]
    logprobs: Float32[Tensor, "B room"] | None = None

    def __repr__(self) -> str:
        return brief_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCarry:
    """Donated. All that changes from one decode step to the next.

    `batch` holds the token that runs next in each row; `active` is 1 for a row that moves on with each step and 0 for padding.
    `log` is None where the host reads each step's tokens itself.
    """

    kv: KVState
    batch: Batch
    sampling: Sampling
    active: Int32[Tensor, "B"]
    log: TokenLog | None = None

    def __repr__(self) -> str:
        active, log = brief(self.active), self.log.token_ids if isinstance(self.log, TokenLog) else None
        return f"DecodeCarry(active={active}, log={'None' if log is None else f'tokens {brief(log)}'}, kv={self.kv!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOutput:
    """One step's results: the tokens drawn, their log-probabilities and the likeliest others (None unless asked for), the logits."""

    token_ids: Int32[Tensor, "B"]
    logprobs: Float32[Tensor, "B"] | None
    top_ids: Int32[Tensor, "B k"] | None
    top_logprobs: Float32[Tensor, "B k"] | None
    logits: Float[Tensor, "B V"]  # that were drawn from: what `process_logits` made of them

    def __repr__(self) -> str:
        return brief_fields(self)


for _value in (TokenLog, DecodeCarry, DecodeOutput):
    register_value(_value)


def decode_step(
    params: Any,
    carry: DecodeCarry,
    config: ModelConfig,
    *,
    process_logits: Callable[[Tensor], Tensor] | None = None,
    token_ids: Int32[Tensor, "B"] | None = None,
    forward: Callable[..., tuple[Tensor, KVState]] = models.forward,
) -> tuple[DecodeCarry, DecodeOutput]:
    """Run one token of every row and draw the next. Donates `carry`; traces with `fullgraph=True` and copies no KV.

    All steps of an engine belong on one stream. Outside traced code a carry of `begin` that was donated before raises `DonatedStateError`;
    traced code does not look, and `commit` finds it.

    `process_logits` maps the logits `[B, V]` to those that are drawn from. `token_ids` are taken instead of drawn ones, and the
    log-probabilities are then theirs: so given text is scored.
    """
    if not torch.compiler.is_compiling():
        require_carry(carry)
        if forward is models.forward and not isinstance(params, models.Params):
            raise InvalidRequestError(f"params={reprlib.repr(params)} must be Params, which a model holds as model.params")
        if carry.log is not None:
            require_fresh(carry.log)
    logits, kv = forward(params, carry.kv, carry.batch, config)
    if process_logits is not None:
        logits = process_logits(logits)
    seq_lens = carry.batch.seq_lens
    places = seq_lens if carry.sampling.temperature is None else seq_lens - 1 + carry.active  # what is greedy does not look
    sampled = sample(logits, carry.sampling, places)
    if token_ids is not None:
        sampled = _forced(logits, sampled, token_ids)
    carry = advance(carry, kv, sampled)
    return carry, DecodeOutput(
        token_ids=sampled.token_ids,
        logprobs=sampled.logprobs,
        top_ids=sampled.top_ids,
        top_logprobs=sampled.top_logprobs,
        logits=logits,
    )


def require_carry(carry: Any) -> None:
    """Raise `InvalidRequestError` for what is no carry."""
    if not isinstance(carry, DecodeCarry):
        raise InvalidRequestError(f"carry={reprlib.repr(carry)} must be the DecodeCarry of begin(...), not {type(carry).__name__}")


def require_fresh(log: TokenLog) -> None:
    """Raise `DonatedStateError` for a carry that was stepped from, or committed, before."""
    ran, num_steps = int(log.ran), int(log.num_steps)
    if ran != num_steps:
        raise DonatedStateError(
            f"this carry has seen {num_steps} steps of session {int(log.session)}, "
            + ("which was committed" if ran < 0 else f"of which {ran} were run: it was donated to a step, use the carry that step returned")
        )


def advance(carry: DecodeCarry, kv: KVState, sampled: Sampled) -> DecodeCarry:
    """The carry of the next step, in which the drawn tokens run.

    A token beyond a row's page table writes into the dummy page, and attends to what the table holds.
    """
    batch, token_ids = carry.batch, sampled.token_ids
    num_pages, page_size = kv.pools[0].shape[1], kv.pools[0].shape[4]
    places = batch.positions, batch.seq_lens
    positions, slots, seq_lens = next_places(*places, batch.page_tables, carry.active, num_pages, page_size)
    windowed = batch.windowed
    if windowed is not None:
        _, frame_slots, _ = next_places(*places, windowed.page_tables, carry.active, kv.pools[1].shape[1], page_size)
        windowed = replace(windowed, slots=frame_slots)
    return replace(
        carry,
        kv=kv,
        batch=replace(batch, input_ids=token_ids, positions=positions, slots=slots, seq_lens=seq_lens, windowed=windowed),
        sampling=record(carry.sampling, token_ids),
        log=None if carry.log is None else _write(carry.log, sampled),
    )


def _write(log: TokenLog, sampled: Sampled) -> TokenLog:
    here = torch.arange(log.token_ids.shape[1], device=log.token_ids.device) == log.num_steps
    logprobs = log.logprobs
    if logprobs is not None and sampled.logprobs is not None:
        logprobs = torch.where(here, sampled.logprobs.unsqueeze(1), logprobs)
    return TokenLog(
        session=log.session,
        ran=log.ran.add_(1),
        num_steps=log.num_steps + 1,
        token_ids=torch.where(here, sampled.token_ids.unsqueeze(1), log.token_ids),
        logprobs=logprobs,
    )


def _forced(logits: Tensor, sampled: Sampled, token_ids: Tensor) -> Sampled:
    logprobs = logits.float().log_softmax(-1).gather(1, token_ids.long().unsqueeze(1)).squeeze(1)
    return replace(sampled, token_ids=token_ids.to(torch.int32), logprobs=logprobs)
