"""The values of decode steps: `DecodeCarry` is all that changes from one step to the next, `DecodeOutput` the results of a step."""

from collections.abc import Callable
from dataclasses import dataclass

from nanovllm.executor.session_lease import SessionLease
from nanovllm.models.common.batch import Batch
from nanovllm.sampling.process_logits import Processing
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
        vocab_size: V. It belongs to the pytree's structure.
    """

    origins: Int32[Tensor, "B"]
    spares: tuple[Int32[Tensor, "B"], ...]
    ran: Int32[Tensor, ""]
    num_splits: Int32[Tensor, ""]
    vocab_size: int

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
        logprobs: Their log-probabilities, float32 `[B]`; None unless a row asked for them or the caller gave `token_ids`.
        top_ids: The k most probable tokens of each row, int32 `[B, k]`; None unless a row asked for them.
        top_logprobs: The log-probabilities of `top_ids`, float32 `[B, k]`, or None.
        logits: The logits that were sampled from, `[B, V]` in the model's dtype; or what a `process_logits` returned.

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


register_value(Branches, static=("vocab_size",))
register_value(TokenLog, static=("lease",))
register_value(DecodeCarry, static=("forward",))
register_value(DecodeOutput)
