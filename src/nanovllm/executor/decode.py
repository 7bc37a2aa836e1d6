"""The decode step as a pure function. `DecodeCarry` holds everything that changes, so one step can follow another without the host.

You can call the step in a loop, capture it in a CUDA graph, or trace it in a larger program with `torch.compile(fullgraph=True)`.
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
    """The tokens sampled since `begin`, kept on the device for `commit`.

    Attributes:
        session: The number of the session, by which `commit` finds the reserved pages; int64, shape `[]`.
        ran: Steps run from any carry of the session, counted in place; int32, shape `[]`. If a carry's `num_steps` differs, that carry was
            donated to another step or committed.
        num_steps: Steps that this carry has seen; int32, shape `[]`.
        token_ids: The tokens, int32 `[B, room]`, of which `[:, :num_steps]` are set.
        logprobs: Their log-probabilities, float32 `[B, room]`, or None if no row asked for them.
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
    """Donated by `decode_step` and `commit`. Everything that changes from one decode step to the next, as tensors.

    `begin` returns the first carry of a session, and each step returns the next one.

    Attributes:
        kv: The KV memory of the engine.
        batch: The token that runs next in each of the B rows, with its position, slot and page table.
        sampling: The sampling options of the rows as tensors.
        active: int32 `[B]`: 1 for a row that moves on with each step, 0 for padding.
        log: The tokens sampled since `begin`; None in the engine's own steps, whose tokens the host reads after each step.
        forward: The model function of the engine that the carry belongs to. It belongs to the pytree's structure; None means `nv.forward`.

    Examples:
        >>> state, carry = nv.begin(model, state, ["Once upon a time"], nv.SamplingParams(temperature=0), room=2)
        >>> carry.batch.input_ids.tolist()
        [632]
        >>> carry, out = nv.decode_step(model.params, carry, model.config)
        >>> carry.batch.input_ids.tolist()
        [11]
    """

    kv: KVState
    batch: Batch
    sampling: Sampling
    active: Int32[Tensor, "B"]
    log: TokenLog | None = None
    forward: Callable[..., tuple[Tensor, KVState]] | None = None

    def __repr__(self) -> str:
        active, log = brief(self.active), self.log.token_ids if isinstance(self.log, TokenLog) else None
        return f"DecodeCarry(active={active}, log={'None' if log is None else f'tokens {brief(log)}'}, kv={self.kv!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOutput:
    """The results of one decode step, as tensors on the model's device.

    Attributes:
        token_ids: The sampled tokens, int32 `[B]`.
        logprobs: Their log-probabilities, float32 `[B]`; None unless a row asked for them.
        top_ids: The k most probable tokens of each row, int32 `[B, k]`; None unless a row asked for them.
        top_logprobs: The log-probabilities of `top_ids`, float32 `[B, k]`, or None.
        logits: The logits that were sampled from, `[B, V]` in the model's dtype. If there was a `process_logits`, this is its result.

    Examples:
        >>> state, carry = nv.begin(model, state, ["Once upon a time"], nv.SamplingParams(temperature=0), room=1)
        >>> carry, out = nv.decode_step(model.params, carry, model.config)
        >>> out.token_ids.tolist(), list(out.logits.shape)
        ([11], [1, 4096])
        >>> out.logprobs is None
        True
    """

    token_ids: Int32[Tensor, "B"]
    logprobs: Float32[Tensor, "B"] | None
    top_ids: Int32[Tensor, "B k"] | None
    top_logprobs: Float32[Tensor, "B k"] | None
    logits: Float[Tensor, "B V"]

    def __repr__(self) -> str:
        return brief_fields(self)


register_value(TokenLog)
register_value(DecodeCarry, static=("forward",))
register_value(DecodeOutput)


def decode_step(
    params: Any,
    carry: DecodeCarry,
    config: ModelConfig,
    *,
    process_logits: Callable[[Tensor], Tensor] | None = None,
    token_ids: Int32[Tensor, "B"] | None = None,
    forward: Callable[..., tuple[Tensor, KVState]] | None = None,
) -> tuple[DecodeCarry, DecodeOutput]:
    """Donates `carry`. Run one token of every row and sample the next one.

    The function traces with `torch.compile(fullgraph=True)` and copies no KV. Call all steps of an engine on one CUDA stream. Traced code
    does not check whether `carry` was donated before; `commit` finds it then.

    Args:
        params: The model's weights, `model.params`.
        carry: The carry that `begin` or the step before returned.
        config: The model's config, `model.config`.
        process_logits: A function from the logits `[B, V]` to the logits to sample from, such as a grammar mask. None: the model's own.
        token_ids: Tokens to take instead of sampled ones, int32 `[B]`. Log-probabilities are then of these tokens, so this scores a given
            text.
        forward: The model function to run, with the signature of `nv.forward`. None: the function that the engine's own steps run, with the
            same kernels.

    Returns:
        The next carry, and the step's output.

    Raises:
        InvalidRequestError: `carry` is not a `DecodeCarry`, or `params` are not `Params`.
        DonatedStateError: The carry was donated to an earlier step, or committed.

    Examples:
        >>> state, carry = nv.begin(model, state, ["Once upon a time"], nv.SamplingParams(temperature=0), room=3)
        >>> for _ in range(3):
        ...     carry, out = nv.decode_step(model.params, carry, model.config)
        >>> state, (reply,) = nv.commit(model, state, carry)
        >>> reply.text
        ', a boy'
    """
    if not torch.compiler.is_compiling():
        require_carry(carry)
        if forward is None and not isinstance(params, models.Params):
            raise InvalidRequestError(f"params={reprlib.repr(params)} must be Params: pass model.params")
        if carry.log is not None:
            require_fresh(carry.log)
    run = forward or carry.forward or models.forward
    logits, kv = run(params, carry.kv, carry.batch, config)
    if process_logits is not None:
        logits = process_logits(logits)
    seq_lens = carry.batch.seq_lens
    places = seq_lens if carry.sampling.temperature is None else seq_lens - 1 + carry.active  # greedy sampling does not read them
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
    """Raise `InvalidRequestError` if `carry` is not a `DecodeCarry`."""
    if not isinstance(carry, DecodeCarry):
        raise InvalidRequestError(f"carry={reprlib.repr(carry)} must be a DecodeCarry from begin(...), not {type(carry).__name__}")


def require_fresh(log: TokenLog) -> None:
    """Raise `DonatedStateError` if the carry of this log was donated to a step or committed."""
    ran, num_steps = int(log.ran), int(log.num_steps)
    if ran != num_steps:
        raise DonatedStateError(
            f"this carry has seen {num_steps} steps of session {int(log.session)}, "
            + ("which was committed" if ran < 0 else f"of which {ran} were run: a step took it over; use the carry that this step returned")
        )


def advance(carry: DecodeCarry, kv: KVState, sampled: Sampled) -> DecodeCarry:
    """Return the carry of the next step, which runs the sampled tokens.

    A token beyond the end of its row's page table is written to the dummy page, and attends to the pages in the table.
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
