"""`score`: the log-probabilities of given continuations. Each distinct context runs once; continuations run as prompt tokens in batches.
Contexts with equal beginnings share the full pages of these.

Contexts are admitted in order, as many at a time as fill a step and fit into the available pages. After a context ran, the logits of its
last token score the first token of each of its continuations. Then the continuations run over its pages, without their last tokens, whose
logits nobody needs. All pages are given back before the next contexts are admitted; the prefix index keeps the full pages of contexts.
"""

import reprlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from nanovllm.chunks.prefill import adopt, plain_request, plain_sequence, reserve_all
from nanovllm.engine.donation import commit_state, enter_with, guarded, require_namespace
from nanovllm.engine.mirrored import mirrored
from nanovllm.engine.prompt import Context, encode, resolve, token_array
from nanovllm.engine.requests import capacity
from nanovllm.engine.resident import resident
from nanovllm.errors import InvalidRequestError, NanoVLLMError
from nanovllm.executor.executor import executor_of
from nanovllm.executor.scoring import Scored, most_logits
from nanovllm.models.model import Model
from nanovllm.ops.distributed.collectives import require_ranks
from nanovllm.sampling.keywords import explain_unknown_keywords
from nanovllm.sampling.params import num_top_of
from nanovllm.state import pool as pools
from nanovllm.state.chunk import Chunk
from nanovllm.state.engine_state import EngineState
from nanovllm.state.kv_cache import pages_for
from nanovllm.state.logprobs import Score
from nanovllm.state.pages import require_writable
from nanovllm.state.pool import Pool, Taken
from nanovllm.state.request import Sequence
from nanovllm.state.sequence_pages import shares_tail, written_pages
from nanovllm.state.vector import IntVector
from nanovllm.types import Int64

Continuation = str | list[int] | tuple[int, ...] | np.ndarray
Found = list[tuple[np.ndarray, Scored]]  # the results of each pass, and the place of each among all of the call


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Task:
    """A distinct context, and its continuations: the place of each one's first log-probability among all of the call, and its tokens.
    `namespace` is that of the call.
    """

    tokens: IntVector
    base: Chunk | None
    namespace: int
    continuations: list[tuple[int, np.ndarray]] = field(default_factory=list)

    def lengths(self) -> list[int]:
        """The number of tokens with KV, for each continuation that runs at all: the last token does not run."""
        return [len(self.tokens) + len(ids) - 1 for _, ids in self.continuations if len(ids) > 1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Run:
    """Tokens of a sequence that run for their logits. The run owns the sequence's pages.

    Attributes:
        sequence: The sequence. If it is filled, its last token runs again.
        at: The index of the next token to run.
        first: The index of the first token whose logits are wanted. Those of all tokens after it are wanted too.
        asked: For each log-probability the index of a token, the id of the token after it, and the place of the log-probability among all
            of the call; int64 `[K, 3]`, ascending by index.
    """

    sequence: Sequence
    at: int
    first: int
    asked: Int64[np.ndarray, "K 3"]


@mirrored
@explain_unknown_keywords
@torch.no_grad()
def score(
    model: Model, state: EngineState, contexts: Seq[Context], continuations: Seq[Continuation], *, top_logprobs: int = 0, namespace: int = 0
) -> tuple[EngineState, list[Score]]:
    """Compute the log-probabilities of given continuations, each after its context.

    Donates `state`. Contexts that are equal run once; to score several continuations of one context, repeat it. Contexts with equal
    beginnings share the full pages of these. Chunks and prefixes in the prefix index are not run again. Requests and sessions stay as they
    are. Afterwards the pages of all continuations are free, and the prefix index keeps the full pages of contexts.

    Args:
        model: The model of `init_state`.
        state: The newest state of the engine.
        contexts: A list of contexts: texts, token ids, chunks, or lists of these in which only the first part may be a chunk.
        continuations: A list with one continuation per context: a text or token ids, at least one token. A text is encoded by itself,
            without a start token, so it usually begins with a space.
        top_logprobs: How many of the most probable tokens to report in the place of each token, up to 20.
        namespace: A number of at least 0. Indexed KV is shared only with requests and calls of the same number.

    Returns:
        The next state, and one score per continuation, in the same order.

    Raises:
        InvalidRequestError: An argument is invalid, or a context with its continuation is too long for the engine.
        OutOfPagesError: Too few pages are available for a context with one of its continuations.
        DonatedStateError: `state` was donated to a later call.
        ReleasedChunkError: A chunk in a context was released.
        ForeignChunkError: A chunk in a context belongs to another engine.
        EngineDeadError: The device is broken, or another rank has gone.

    Examples:
        >>> state, facts = nv.prefill(model, state, "The king of Aistonia is Oswin. The capital of Aistonia is Velmora.")
        >>> answers = [" Oswin.", " Velmora.", " a cat."]
        >>> state, scores = nv.score(model, state, [[facts, " The king of Aistonia is"]] * 3, answers)
        >>> max(zip(answers, scores), key=lambda pair: pair[1].total)[0]
        ' Oswin.'

        The log-probabilities of a prompt, each with the most probable token in its place:

        >>> ids = model.tokenizer.encode("Once upon a time, there")
        >>> state, (prompt,) = nv.score(model, state, [ids[:1]], [ids[1:]], top_logprobs=1)
        >>> [model.tokenizer.decode([entry.top[0][0]]) for entry in prompt.entries]
        [' upon', ' a', ' time', ',', ' a']
    """
    state, num_top = enter_with(model, state), num_top_of("top_logprobs", top_logprobs)
    require_namespace(namespace)
    tasks, token_ids = _tasks(model, state, contexts, continuations, namespace)
    if (back := resident(state, contexts)) is not state:
        state, (tasks, token_ids) = back, _tasks(model, back, contexts, continuations, namespace)
    for task in tasks:
        _admitted(state, [task])  # raises before anything is written
    found: Found = []
    with guarded(state) as taken:
        inner, done = state, 0
        while done < len(tasks):
            admitted, sequences = _admitted(inner, tasks[done : done + state.config.max_num_seqs])
            inner = _scored(model, admitted, tasks[done : done + len(sequences)], sequences, taken, found, num_top)
            done += len(sequences)
        scores = _scores(token_ids, found)  # waits for the device, which may have waited in vain for a rank
        require_ranks(model.config.mesh)
        return commit_state(inner), scores


def _scores(token_ids: Seq[np.ndarray], found: Found) -> list[Score]:
    """The scores of all continuations, whose tokens are `token_ids`, from the places and the results of all passes."""
    if not found:
        return []
    order = np.argsort(np.concatenate([places for places, _ in found]))
    arrays = [torch.cat(each).cpu().numpy()[order] for each in zip(*(scored for _, scored in found), strict=True)]
    for array in arrays:
        array.flags.writeable = False
    ends = np.cumsum([len(ids) for ids in token_ids])[:-1]
    each = zip(token_ids, *(np.split(array, ends) for array in arrays), strict=True)
    return [Score(token_ids=ids.tolist(), logprobs=own, top_ids=top, top_logprobs=values) for ids, own, top, values in each]


def _tasks(model: Model, state: EngineState, contexts: Any, continuations: Any, namespace: int) -> tuple[list[_Task], list[np.ndarray]]:
    """The distinct contexts in order, and the tokens of all continuations.

    Raises:
        InvalidRequestError: As in `score`.
    """
    for name, given in (("contexts", contexts), ("continuations", continuations)):
        if not isinstance(given, list | tuple):
            raise InvalidRequestError(f"{name} must be a list, not {type(given).__name__}: pass one as [{name.removesuffix('s')}]")
    if len(contexts) != len(continuations):
        raise InvalidRequestError(f"{len(contexts)} contexts and {len(continuations)} continuations: pass one continuation per context")
    tasks: dict[tuple[bytes, int | None], _Task] = {}
    token_ids, start = [], 0
    for place, (context, continuation) in enumerate(zip(contexts, continuations, strict=True)):
        where = "" if len(contexts) == 1 else f" {place}"
        try:
            resolved = resolve(model, state, context)
        except NanoVLLMError as error:
            raise type(error)(f"context{where}: {error}") from None
        ids = _continuation(model, continuation, f"continuation{where}")
        tokens, base = resolved.tokens, resolved.base
        total, limit = len(tokens) + len(ids), capacity(state, base)
        if total > limit:
            raise InvalidRequestError(
                f"context{where} has {resolved.count} tokens and its continuation {len(ids)}; this engine holds at most {limit} together"
            )
        # Equal tokens have equal KV, unless it is approximate.
        key = tokens.array().tobytes(), None if base is None or base.provenance.exact else base.liveness
        tasks.setdefault(key, _Task(tokens=tokens, base=base, namespace=namespace)).continuations.append((start, ids))
        token_ids.append(ids)
        start += len(ids)
    return list(tasks.values()), token_ids


def _continuation(model: Model, given: Any, name: str) -> np.ndarray:
    """The tokens of a continuation, int32."""
    if not isinstance(given, str | list | tuple | np.ndarray):
        raise InvalidRequestError(f"{name}={reprlib.repr(given)} must be a text or token ids, not {type(given).__name__}")
    if isinstance(given, list | tuple) and any(isinstance(part, str | list | tuple | np.ndarray | Chunk) for part in given):
        raise InvalidRequestError(
            f"{name}={reprlib.repr(given)} must be a text or token ids: to score several continuations, repeat their context"
        )
    try:
        if isinstance(given, str):
            ids = encode(model, given, first=False, most=model.config.max_position_embeddings)
        else:
            ids = token_array(given, model.config.vocab_size)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{name}: {error}") from None
    if not len(ids):
        raise InvalidRequestError(f"{name}={reprlib.repr(given)} is empty: it must hold at least one token")
    return ids


def _admitted(state: EngineState, tasks: Seq[_Task]) -> tuple[EngineState, list[Sequence]]:
    """Sequences for the contexts of the first tasks, which own the pages of their prefixes.

    As many tasks as fill a step, and as have room for all contexts and any one of the continuations.

    Raises:
        OutOfPagesError: Not even the first task has room.
    """
    size, owners, num_tokens, own, spare = state.config.page_size, list[Sequence](), 0, 0, 0
    for task in tasks:
        after, (sequence,) = adopt(state, [plain_sequence(task.tokens, task.base, task.namespace)], logits=True)
        own += _num_missing(after.pool, sequence, size)
        spare = max(spare, _num_spare(task, sequence, size))
        if own + spare > after.pool.num_available:
            if owners:
                break
            longest = max(task.lengths(), default=len(task.tokens))
            raise pools.too_few(state.pool, f"a context with a continuation, {longest} tokens to run, needs {own + spare} more pages")
        reused = (len(task.continuations) - 1) * len(task.tokens)
        state = replace(after, stats=after.stats.add(reused_tokens=reused))
        owners.append(sequence)
        num_tokens += max(1, sequence.todo)
        if num_tokens >= state.config.max_num_batched_tokens:
            break
    return state, owners


def _num_missing(pool: Pool, sequence: Sequence, page_size: int) -> int:
    """How many pages a sequence takes before its tokens run."""
    if not sequence.todo:
        return 0
    return pages_for(len(sequence.tokens), page_size) - len(sequence.pages) + shares_tail(pool, sequence, page_size)


def _num_spare(task: _Task, sequence: Sequence, page_size: int) -> int:
    """How many pages the longest continuation takes while the context has its pages.

    The only continuation writes into the last page of its context, if that is not the page of a chunk. Others need a copy of it.
    """
    lengths, count = task.lengths(), len(task.tokens)
    if not lengths:
        return 0
    alone = len(lengths) == 1 and sequence.todo > 0
    return pages_for(max(lengths), page_size) - (pages_for(count, page_size) if alone else count // page_size)


def _scored(
    model: Model, state: EngineState, tasks: Seq[_Task], sequences: list[Sequence], taken: Taken, found: Found, num_top: int
) -> EngineState:
    """Run contexts and their continuations, and give all their pages back. Donates the KV; adds to `found`."""
    state, sequences = reserve_all(state, sequences, [len(s.tokens) for s in sequences], taken, kept_back=0)
    contexts = [_context_run(task, sequence) for task, sequence in zip(tasks, sequences, strict=True)]
    state = _forward(model, state, [run for run in contexts if run.sequence.todo], found, num_top)
    pool, runs = state.pool, []
    for task, run in zip(tasks, contexts, strict=True):
        filled = run.sequence.advance(run.sequence.todo)
        pool = pools.insert(pool, filled.tokens.array(0, filled.num_exact), filled.pages.array(), task.namespace)
        again = [] if run.sequence.todo else [run]
        mine = [*again, *(_continuation_run(filled, start, ids) for start, ids in task.continuations if len(ids) > 1)]
        pool = pools.release(pool, filled.pages) if not mine else pool
        for _ in mine[1:]:
            pool = pools.acquire(pool, filled.pages)
        runs += mine
    return _in_turn(model, replace(state, pool=pool), runs, taken, found, num_top)


def _context_run(task: _Task, sequence: Sequence) -> _Run:
    """The unfilled tokens of a context, or its last token again, for the logits of the last token."""
    last = len(task.tokens) - 1
    asked = [(last, int(ids[0]), start) for start, ids in task.continuations]
    return _Run(sequence=sequence, at=min(sequence.num_filled, last), first=last, asked=np.array(asked, np.int64))


def _continuation_run(context: Sequence, start: int, ids: np.ndarray) -> _Run:
    """The tokens of a continuation without the last one, after its filled context."""
    tokens, at = context.tokens.extend(ids[:-1]), len(context.tokens)
    asked = np.stack((np.arange(at, len(tokens)), ids[1:], np.arange(start + 1, start + len(ids))), 1).astype(np.int64)
    return _Run(
        sequence=replace(context, tokens=tokens, request=plain_request(len(tokens), context.request.namespace)),
        at=at,
        first=at,
        asked=asked,
    )


def _in_turn(model: Model, state: EngineState, runs: Seq[_Run], taken: Taken, found: Found, num_top: int) -> EngineState:
    """Run as many runs at a time as fill a step and fit into the available pages, and give their pages back."""
    limits, done = state.config, 0
    while done < len(runs):
        batch, num_tokens, missing = list[_Run](), 0, 0
        for run in runs[done : done + limits.max_num_seqs]:
            missing += _num_missing(state.pool, run.sequence, limits.page_size)
            if batch and (missing > state.pool.num_available or num_tokens >= limits.max_num_batched_tokens):
                break
            batch.append(run)
            num_tokens += len(run.sequence.tokens) - run.at
        done += len(batch)
        owners = [run.sequence for run in batch]
        state, owners = reserve_all(state, owners, [len(s.tokens) for s in owners], taken)
        for sequence in owners:
            require_writable(state.pool.pages, written_pages(sequence, sequence.todo, limits.page_size))
        state = _forward(model, state, [replace(run, sequence=s) for run, s in zip(batch, owners, strict=True)], found, num_top)
        pool = state.pool
        for sequence in owners:
            pool = pools.release(pool, sequence.pages)
        state = replace(state, pool=pool)
    return state


def _forward(model: Model, state: EngineState, runs: Seq[_Run], found: Found, num_top: int) -> EngineState:
    """Run tokens on pages that are reserved, at most one step's token budget at a time. Donates the KV.

    No run begins before those ahead of it have ended, or end in the same pass, because it may read what they fill. Adds the
    log-probabilities with their places to `found`.
    """
    runs, limits, kv, stats = list(runs), state.config, state.kv, state.stats
    while True:
        rows: list[tuple[Sequence, int]] = []
        asked, places = [], []
        budget, room, num_tokens = limits.max_num_batched_tokens, most_logits(model.config.vocab_size), 0
        for i, run in enumerate(runs):
            if not (left := len(run.sequence.tokens) - run.at):
                continue
            count = min(budget - num_tokens, left, max(0, run.first - run.at) + room)
            if count <= 0 or len(rows) == limits.max_num_seqs:
                break
            start, stop = np.searchsorted(run.asked[:, 0], (run.at, run.at + count))
            asked.append(run.asked[start:stop, :2] + (num_tokens - run.at, 0))
            places.append(run.asked[start:stop, 2])
            rows.append((run.sequence, count))
            num_tokens += count
            room -= max(0, run.at + count - max(run.at, run.first))
            filled = run.sequence.advance(min(count, run.sequence.todo))
            runs[i] = replace(run, sequence=filled, at=run.at + count)
            if count < left:
                break
        if not rows:
            return replace(state, kv=kv, stats=stats)
        scored, kv = executor_of(state).score(model, kv, rows, np.concatenate(asked), num_top=num_top, frames=state.pool.frames)
        found.append((np.concatenate(places), scored))
        stats = stats.add(prefill_tokens=num_tokens)
