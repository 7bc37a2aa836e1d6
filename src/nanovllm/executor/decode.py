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
from nanovllm.executor.session_lease import SessionLease
from nanovllm.models.common.batch import Batch
from nanovllm.ops.elementwise.decode_rows import next_places
from nanovllm.sampling.process_logits import Processing, TokensSoFar, mapped, process
from nanovllm.sampling.sampler import Sampled, record, sample
from nanovllm.sampling.tensors import Sampling
from nanovllm.state.kv_cache import KVState
from nanovllm.types import Float, Float32, Int32, Int64, Tensor, brief, brief_fields, register_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Branches:
    """What `split_rows` needs in a session that was begun with `branching`.

    Attributes:
        origins: The context of `begin` that each row continues, int32 `[B]`.
        spares: For each KV pool a page of each row that holds nothing, int32 `[B]`. In a pool of sliding-window layers it is a frame.
        ran: How often rows were split, from any carry of the session, counted in place; int32, shape `[]`.
        num_splits: How often they were split up to this carry; int32, shape `[]`.
    """

    origins: Int32[Tensor, "B"]
    spares: tuple[Int32[Tensor, "B"], ...]
    ran: Int32[Tensor, ""]
    num_splits: Int32[Tensor, ""]

    def __repr__(self) -> str:
        return brief_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLog:
    """The tokens sampled since `begin`, kept on the device for `commit`.

    Attributes:
        session: The number of the session, by which `commit` finds the reserved pages; int64, shape `[]`.
        ran: Steps run from any carry of the session, counted in place; int32, shape `[]`. If a carry's `num_steps` differs, that carry was
            donated to another step or committed.
        num_steps: Steps that this carry has seen; int32, shape `[]`.
        token_ids: The tokens, int32 `[B, room]`, of which `[:, :num_steps]` are set; -1 in steps in which a row was not active.
        logprobs: Their log-probabilities, float32 `[B, room]`, or None if no row asked for them.
        branches: For `split_rows`; None if the session was begun without `branching`.
        lease: What the host knows about the carries of the session. It belongs to the pytree's structure.
    """

    session: Int64[Tensor, ""]
    ran: Int32[Tensor, ""]
    num_steps: Int32[Tensor, ""]
    token_ids: Int32[Tensor, "B room"]
    logprobs: Float32[Tensor, "B room"] | None = None
    branches: Branches | None = None
    lease: SessionLease | None = None

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
        active: int32 `[B]`: 1 for a row that moves on with each step, 0 for padding and for rows that have stopped.
        log: The tokens sampled since `begin`; None in the engine's own steps, whose tokens the host reads after each step.
        prompt: The prompts that the next step runs, in a session that was begun with `fill=False`; None otherwise, and after that step.
        processing: The functions of the caller between logits and samples, with what they carry.
        token_ids: The tokens of each row so far, int32 `[B, W]`, written in place; `batch.seq_lens` of them are tokens. None without
            `processing`.
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
    prompt: Batch | None = None
    processing: tuple[Processing, ...] = ()
    token_ids: Int32[Tensor, "B W"] | None = None
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


register_value(Branches)
register_value(TokenLog, static=("lease",))
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
    """Donates `carry`. Run one token of every row, or the prompts of a session begun with `fill=False`, and sample the next one.

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
            If the step is not traced: the carry has seen `room` steps, so its rows have no pages for another one.
        DonatedStateError: The carry was donated to an earlier step, or committed.

    Examples:
        >>> state, carry = nv.begin(model, state, ["Once upon a time"], nv.SamplingParams(temperature=0), room=3)
        >>> for _ in range(3):
        ...     carry, out = nv.decode_step(model.params, carry, model.config)
        >>> state, (reply,) = nv.commit(model, state, carry)
        >>> reply.text
        ', a boy'
    """
    num_steps = None
    if not torch.compiler.is_compiling():
        require_carry(carry)
        if forward is None and not isinstance(params, models.Params):
            raise InvalidRequestError(f"params={reprlib.repr(params)} must be Params: pass model.params")
        if carry.log is not None and (carry.log.lease is None or carry.log.lease.checked):
            num_steps = require_fresh(carry.log)
            require_room(carry.log, num_steps)
    run = forward or carry.forward or models.forward
    logits, kv = run(params, carry.kv, carry.batch if carry.prompt is None else carry.prompt, config)
    if carry.processing:
        carry, logits = _processed(carry, logits)
    if process_logits is not None:
        logits = process_logits(logits)
    seq_lens = carry.batch.seq_lens
    places = seq_lens if carry.sampling.temperature is None else seq_lens - 1 + carry.active  # greedy sampling does not read them
    sampled = sample(logits, carry.sampling, places)
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


def require_carry(carry: Any) -> None:
    """Raise `InvalidRequestError` if `carry` is not a `DecodeCarry`."""
    if not isinstance(carry, DecodeCarry):
        raise InvalidRequestError(f"carry={reprlib.repr(carry)} must be a DecodeCarry from begin(...), not {type(carry).__name__}")


def log_of(carry: Any) -> TokenLog:
    """The log of a carry of `begin`. Raises `InvalidRequestError` for anything else."""
    require_carry(carry)
    if carry.log is None:
        raise InvalidRequestError(f"carry={carry!r} has no log: pass the carry of begin, or of a later decode_step")
    return carry.log


def require_fresh(log: TokenLog) -> int:
    """Return how many steps the carry of this log has seen. Waits for the device only if the host does not know the carry.

    Raises:
        DonatedStateError: The carry was donated to a step, or committed.
    """
    lease = log.lease
    if lease is not None and not lease.committed and lease.knows(log.num_steps, _counters(log)):
        return lease.num_steps
    if lease is not None and not lease.committed and lease.outdated(log.num_steps):
        raise DonatedStateError(f"this carry of session {lease.session} was donated to a captured function: use the carry that it returned")
    ran, num_steps = int(log.ran), int(log.num_steps)
    if lease is not None and lease.committed:
        ran = -1
    if ran != num_steps:
        raise DonatedStateError(
            f"this carry has seen {num_steps} steps of session {int(log.session)}, "
            + ("which was committed" if ran < 0 else f"of which {ran} were run: a step took it over; use the carry that this step returned")
        )
    if log.branches is not None and int(log.branches.ran) != int(log.branches.num_splits):
        raise DonatedStateError(f"the rows of this carry of session {int(log.session)} were split: use the carry that split_rows returned")
    return num_steps


def _counters(log: TokenLog) -> tuple[Tensor, ...]:
    """The tensors that every step, and every split, of the session counts up in place."""
    return (log.ran,) if log.branches is None else (log.ran, log.branches.ran)


def require_room(log: TokenLog, num_steps: int, more: int = 1) -> None:
    """Raise `InvalidRequestError` if `more` steps from a carry that has seen `num_steps` steps exceed the session's room."""
    if num_steps + more > log.token_ids.shape[1]:
        raise InvalidRequestError(
            f"this carry has seen {num_steps} steps and its session has room={log.token_ids.shape[1]}: commit it, or begin with more room"
        )


def note(log: TokenLog, num_steps: int) -> None:
    """Let the host know that the carry of this log is the newest, and has seen `num_steps` steps."""
    if log.lease is not None:
        log.lease.note(log.num_steps, _counters(log), num_steps)


def advance(carry: DecodeCarry, kv: KVState, sampled: Sampled) -> DecodeCarry:
    """Return the carry of the next step, which runs the sampled tokens.

    A token beyond the end of its row's page table is written to the dummy page, and attends to the pages in the table.
    """
    batch, token_ids, log = carry.batch, sampled.token_ids, carry.log
    if log is not None:  # a row that has stopped runs its last token again, so that its KV stays as it is
        log = _write(log, sampled, carry.active > 0)
        token_ids = torch.where(carry.active > 0, token_ids, batch.input_ids)
    if carry.token_ids is not None:
        last = (batch.seq_lens.long().unsqueeze(1)).clamp(max=carry.token_ids.shape[1] - 1)
        carry.token_ids.scatter_(1, last, token_ids.unsqueeze(1))
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
