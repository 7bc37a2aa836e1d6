"""Errors that belong to a request: whose they are, how the request ends, and the state in which the others go on.

A step that runs out of device memory is repeated with half of the tokens of the pass that failed, down to one. Later steps may run a little
more each, so the budget doubles in about 45 steps until it is `max_num_batched_tokens` again. Ranks that share a model do so together, if
one of them finds before a pass that it lacks the memory (`executor/agreed_memory.py`); one that runs out later ends the engine.
"""

import time
import traceback
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from immutables import Map

from nanovllm.config import EngineConfig
from nanovllm.engine.donation import forgotten, overwritten, without_host_pages
from nanovllm.engine.output import draw_token, reply_text, result
from nanovllm.engine.plan import Plan
from nanovllm.errors import NanoVLLMError, OutOfPagesError, RequestFailedError
from nanovllm.executor.agreed_memory import SharedShortage
from nanovllm.executor.executor import Drawn, runtime_of
from nanovllm.models.model import Model
from nanovllm.sampling.process_logits import Culprit
from nanovllm.state.device_errors import chain, fatal, message_of, out_of_memory
from nanovllm.state.engine_state import EngineState
from nanovllm.state.logprobs import RowScores
from nanovllm.state.pool import Pool
from nanovllm.state.request import Sequence, StepOutput
from nanovllm.state.sequence_pages import give_up_together
from nanovllm.state.steady import Steady

E = TypeVar("E", bound=BaseException)
TRACE = "Traceback (most recent call last):\n"
GROWTH = 64  # a lowered budget grows by a 64th of itself in each step that has enough memory


@dataclass(slots=True)
class Attempt:
    """How far one attempt at a step has come. Mutable, so that it is known after an exception.

    Attributes:
        plan: What it runs; None for a decode step that needs no schedule.
        stage: What it does now: it copies pages, or runs one of its two passes.
    """

    plan: Plan | None = None
    stage: Literal["copy", "prefill", "decode"] = "copy"


def step_limits(state: EngineState) -> EngineConfig:
    """The limits of the next step."""
    budget = state.token_budget
    return state.config if budget is None else replace(state.config, max_num_batched_tokens=budget)


def relaxed(state: EngineState) -> EngineState:
    """The state after a step that had enough memory, with a little more of its budget, which had been lowered."""
    assert state.token_budget is not None
    more = state.token_budget + state.token_budget // GROWTH + 1
    return replace(state, token_budget=None if more >= state.config.max_num_batched_tokens else more)


def recovered(model: Model, state: EngineState, error: Exception, attempt: Attempt) -> tuple[EngineState, list[StepOutput], bool] | None:
    """The state in which a step can be tried again after an exception, without the requests whose exception it was.

    Memory that a request's own function lacks is the error of this request.

    Returns:
        The state, the outputs of the requests that ended, and whether to try again in the same call; or None if the exception belongs to no
        request. If memory is too short for a single token, the other requests wait for the next call, because the shortage may pass.
    """
    if fatal(error) is not None:
        return None
    plan, steady = attempt.plan, state.running if isinstance(state.running, Steady) else ()
    prompts = () if plan is None or attempt.stage == "decode" else plan.prefill
    decoding = steady if plan is None else () if attempt.stage == "prefill" else plan.decode
    num_tokens = _num_tokens(prompts, decoding)
    others = 0 if plan is None else _num_tokens(plan.prefill, plan.decode) - num_tokens
    culprit = next((note for one in chain(error) for note in reversed(getattr(one, "__notes__", ())) if isinstance(note, Culprit)), None)
    budget, stats, kind, failed, message = state.token_budget, state.stats, RequestFailedError, list[Sequence](), ""
    stuck = () if plan is None or num_tokens + others else plan.stuck  # of a step that runs no token, and only copies pages
    if short := (num_tokens > 0 or len(stuck) > 0) and out_of_memory(error) and not culprit:
        several = runtime_of(state).mirror is not None or (model.config.mesh is not None and model.config.mesh.size > 1)
        if several and not any(isinstance(one, SharedShortage) for one in chain(error)):
            return None  # other ranks may have had enough memory, and run the step as it was
        stats = stats.add(memory_shortages=1)
        if num_tokens + others > 1:  # rows that decode come first in a budget, so a step that fails in them runs no prompt next
            budget = max(1, num_tokens // 2 + (others if attempt.stage == "prefill" else 0))
        else:
            failed, kind = [*(s for s, _ in prompts), *decoding, *stuck], OutOfPagesError
            message = "the device has no memory for even one of its tokens"
    elif culprit:
        rows = [*(s for s, count in prompts if count == s.todo), *decoding]
        theirs = [s for s in rows if culprit.processor is None or s.request.process_logits == culprit.processor]
        failed = [s for s in theirs if not culprit.request_ids or _id(s) in culprit.request_ids]
        message = str(culprit)
    if not (short or failed):
        return None
    as_value(error)
    now, lost = time.perf_counter(), frozenset() if plan is None else overwritten(state.pool, plan.allocated, plan.frames)
    lost_host = frozenset(() if plan is None or plan.moves is None else plan.moves.out)
    state = without_host_pages(forgotten(state, lost), lost_host)
    state, outputs = replace(state, token_budget=budget, stats=stats), []
    for rid in map(_id, failed):
        waiting, running = state.waiting, tuple(state.running)
        sequence = waiting.items.get(rid) or next(s for s in running if _id(s) == rid)
        waiting = waiting.pop(rid) if rid in waiting.items else waiting
        pool, kept = ended(state.pool, state.kept, [sequence])
        state = replace(state, pool=pool, kept=kept, waiting=waiting, running=tuple(s for s in running if s is not sequence))
        if plan is not None and stuck:  # they would have ended without the shortage, too
            outputs.append(stuck_output(model, sequence, plan.pool, now))
        else:
            outputs.append(last_output(model, sequence, (), "error", now, request_error(rid, kind, message, error)))
    return state, outputs, not (short and failed)


def draw(sequence: Sequence, token: int, drawn: Drawn, row: int, now: float, failed: dict[int, NanoVLLMError]) -> Sequence:
    """`draw_token`. If the text cannot be searched for stop strings, the sequence is not searched, and its error is noted in `failed`."""
    try:
        return draw_token(sequence, token, drawn, row, now)
    except Exception as error:
        failed[_id(sequence)] = unsearchable(sequence, token, error)
        return draw_token(replace(sequence, stops=None), token, drawn, row, now)


def unsearchable(sequence: Sequence, token: int, error: Exception) -> NanoVLLMError:
    """The error of a sequence whose text up to `token` cannot be searched for stop strings."""
    message = f"token {token} cannot be searched for stop={list(sequence.request.sampling.stop)}"
    return request_error(_id(sequence), RequestFailedError, message, as_value(error))


def outside(sequence: Sequence, error: Exception) -> NanoVLLMError:
    """The error of a sequence whose newest token its grammar does not allow."""
    return request_error(_id(sequence), RequestFailedError, f"in its grammar {sequence.request.sampling.grammar!r}", as_value(error))


def last_output(
    model: Model,
    sequence: Sequence,
    token_ids: tuple[int, ...],
    reason: str,
    now: float,
    error: NanoVLLMError | None = None,
    scored: RowScores = None,
    *,
    stuck: bool = False,
) -> StepOutput:
    """The output of a request that ends. A reply that cannot be decoded ends with an error, and has no text.

    `stuck`: live chunks leave it no page for another token.
    """
    try:
        text = reply_text(model, sequence)
    except Exception as raised:
        text, error = "", error or request_error(_id(sequence), RequestFailedError, "its tokens cannot be decoded", as_value(raised))
    output = result(sequence, text, reason if error is None else "error", now, error, out_of_pages=stuck and error is None)
    return StepOutput(output.request_id, token_ids, output.finish_reason, output, error, scored)


def ended(pool: Pool, kept: Map[int, Sequence], sequences: Seq[Sequence]) -> tuple[Pool, Map[int, Sequence]]:
    """Give up the pages of ended sequences, or keep a sequence if its request asked for that."""
    for sequence in sequences:
        if sequence.request.keep:
            kept = kept.set(_id(sequence), sequence)
    return give_up_together(pool, [sequence for sequence in sequences if not sequence.request.keep]), kept


def stuck_output(model: Model, sequence: Sequence, pool: Pool, now: float) -> StepOutput:
    """The output of a sequence that can never get more pages while the live chunks exist: it ends with its reply, or with an error."""
    error = None if sequence.num_generated else _out_of_pages(sequence, pool)
    return last_output(model, sequence, (), "length", now, error, stuck=True)


def _out_of_pages(sequence: Sequence, pool: Pool) -> NanoVLLMError:
    why = f"its {sequence.tokens.length} tokens do not fit, because live chunks leave it only {pool.num_available} of "
    return request_error(_id(sequence), OutOfPagesError, f"{why}{pool.pages.num_pages} pages: release chunks")


def request_error(request_id: int, kind: type[NanoVLLMError], message: str, cause: Exception | None = None) -> NanoVLLMError:
    """An error that belongs to a request."""
    told = "" if cause is None else f": {type(cause).__name__}: {message_of(cause)}"
    error = kind(f"request {request_id} failed: {message}{told}")
    error.request_id, error.__cause__ = request_id, cause
    return error


def as_value(error: E) -> E:
    """An exception to be kept in a result: its traceback becomes a note, because frames hold the tensors and states of their functions.

    So do those of all exceptions that it refers to. A `Culprit` is no note any more, and of several tracebacks of one object the newest is.
    """
    left, seen = list[BaseException]([error]), set[int]()
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        parts = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        left += [other for other in (one.__cause__, one.__context__, *parts) if other is not None]
        notes, trace = getattr(one, "__notes__", []), one.__traceback__
        kept = [note for note in notes if not isinstance(note, Culprit) and not (trace and str(note).startswith(TRACE))]
        if len(kept) < len(notes):
            one.__notes__ = kept
        if trace is not None:
            one.add_note("".join([TRACE, *traceback.format_tb(trace)]))
            one.__traceback__ = None
    return error


def _num_tokens(prompts: Seq[tuple[Sequence, int]], decoding: Seq[Sequence]) -> int:
    return sum(count for _, count in prompts) + len(decoding)


def _id(sequence: Sequence) -> int:
    return sequence.request.request_id
