"""Page reservation and prefill for the functional calls: all pages are reserved before the first write, then prompts run in pieces.

Contexts of one call may share: a context begins with the full pages that those before it fill, as requests of one step do. The contexts
then run in order, so that no token runs in an earlier pass than a token whose KV it reads.
"""

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from nanovllm.chunks.handles import chunk_of
from nanovllm.engine.donation import commit_state, enter_with, guarded, require_chunk, require_namespace
from nanovllm.engine.host_copies import settled
from nanovllm.engine.mirrored import mirrored
from nanovllm.engine.output import counted
from nanovllm.engine.prompt import parts_of, resolve
from nanovllm.engine.requests import begin_sequence, capacity
from nanovllm.engine.resident import resident
from nanovllm.errors import InvalidRequestError
from nanovllm.executor.executor import executor_of
from nanovllm.models.model import Model
from nanovllm.sampling.keywords import explain_unknown_keywords
from nanovllm.sampling.params import SamplingParams
from nanovllm.state import pool as pools
from nanovllm.state.chunk import Chunk
from nanovllm.state.engine_state import EngineState
from nanovllm.state.kv_cache import copy_pages, pages_for
from nanovllm.state.pages import require_writable
from nanovllm.state.pool import Pool, Taken
from nanovllm.state.request import Request, Sequence
from nanovllm.state.sequence_pages import begun, frames_of_copies, offered, reserve, written_pages
from nanovllm.state.vector import IntVector


def plain_sequence(tokens: IntVector, base: Chunk | None, namespace: int = 0) -> Sequence:
    """A sequence that only fills its tokens, after its base chunk. It does not own the chunk's pages yet."""
    return begin_sequence(plain_request(len(tokens), namespace), tokens, base)


def plain_request(count: int, namespace: int = 0) -> Request:
    """A request that prefills `count` tokens and generates none."""
    return Request(
        request_id=-1, num_prompt=count, sampling=SamplingParams(), seed=0, max_len=count, stop_ids=frozenset(), arrival=0.0,
        namespace=namespace,
    )  # fmt: skip


def adopt(state: EngineState, sequences: Seq[Sequence], *, logits: bool = False) -> tuple[EngineState, list[Sequence]]:
    """Make each sequence an owner of its prefix: its base chunk's pages, or longer ones from the prefix index.

    Matches in the index must have the KV of sliding-window layers for all their pages, because the sequence becomes a chunk.

    Args:
        state: The state; its pool and its stats change.
        sequences: Sequences that own no page yet.
        logits: The last token runs even if its KV is filled, so it does not count as reused.
    """
    pool, owners, reused = state.pool, [], 0
    for asked in sequences:
        matched, _ = pools.reusable(pool, asked.tokens.array(), whole=True, namespace=asked.request.namespace)
        pool, sequence = begun(pools.acquire(pool, asked.pages), asked, matched, 0, state.config.page_size)
        filled = min(sequence.num_filled, len(sequence.tokens) - logits)
        owners.append(replace(sequence, most_filled=filled))
        reused += filled
    return replace(state, pool=pool, stats=state.stats.add(reused_tokens=reused)), owners


def reserve_all(
    state: EngineState,
    sequences: Seq[Sequence],
    lengths: Seq[int],
    taken: Taken,
    *,
    kept_back: int | None = None,
    most_todo: int | None = None,
) -> tuple[EngineState, list[Sequence]]:
    """Give each sequence its own pages for up to `lengths` tokens, and copy partly filled shared pages. Donates the KV.

    Args:
        state: The state; its KV, its pool and its stats change.
        sequences: Sequences that own their pages.
        lengths: For each the number of tokens.
        taken: The record of the pages that are taken.
        kept_back: If given, each sequence begins with the full pages that those before it fill with their tokens, except the last
            `kept_back` of each. The pages are in the index from now on, so the tokens must run, in order, before anything else does. Their
            last token runs for its logits. None: nothing is shared before it is filled.
        most_todo: The most tokens that the sequences may leave to one step. None: any number.

    Raises:
        OutOfPagesError: Too few pages are available; nothing was written.
        InvalidRequestError: More than `most_todo` tokens are left; nothing was written.
    """
    pool, owners, copies, pages, reused = pools.planning(state.pool), list(sequences), [], [], 0
    for i, length in enumerate(lengths):
        if kept_back is not None:
            pool, owners[i] = _begun_with_offered(pool, owners[i], kept_back)
            reused += owners[i].most_filled - sequences[i].most_filled
        done = reserve(pool, owners[i], length, state.config.page_size)
        if done is None:
            missing = pages_for(length, state.config.page_size) - len(owners[i].pages)
            raise pools.too_few(pool, f"a context of {length} tokens needs {missing} more pages")
        pool, owners[i], copied, fresh = done
        pages.extend(fresh)
        copies.extend(copied)
        if kept_back is not None:
            pool = offered(pool, owners[i], max(0, owners[i].todo - kept_back), state.config.page_size)
    if most_todo is not None and (count := sum(max(1, s.todo) for s in owners)) > most_todo:
        raise InvalidRequestError(f"fill=False leaves {count} tokens to the first step, more than max_num_batched_tokens={most_todo}")
    taken.note(pool, pages)  # only after all is reserved: pages that a refused call would have taken over keep their KV
    state = settled(state, pool, taken)
    kv = copy_pages(state.kv, tuple(copies), frames_of_copies(state.pool, copies))
    pool = pools.release(state.pool, [source for source, _ in copies])
    return replace(state, kv=kv, pool=pool, stats=state.stats.add(reused_tokens=reused)), owners


def _begun_with_offered(pool: Pool, sequence: Sequence, kept_back: int) -> tuple[Pool, Sequence]:
    """The sequence over pages of the index that hold more of its tokens, except the last `kept_back`, than its own, if there are some."""
    size, length = pool.prefix.page_size, sequence.tokens.length
    matched, _ = pools.reusable(pool, sequence.tokens.array(0, length - kept_back), whole=True, namespace=sequence.request.namespace)
    pool, sequence = begun(pool, sequence, matched, 0, size)
    return pool, replace(sequence, most_filled=max(sequence.most_filled, min(sequence.num_filled, length - 1)))


def fill(
    model: Model, state: EngineState, sequences: Seq[Sequence], keep_back: int = 0, *, shared: bool = False
) -> tuple[EngineState, list[Sequence]]:
    """Run all unfilled tokens of the sequences except the last `keep_back` of each, at most one step's token budget at a time.

    Donates the KV. Full pages that were filled enter the prefix index. A sequence runs no token before those ahead of it have run all of
    theirs, or do so in the same pass.

    Args:
        model: The model.
        state: The state.
        sequences: The sequences, which have pages for their tokens.
        keep_back: How many tokens at the end of each stay unfilled.
        shared: Whether `reserve_all` shared the pages, so that a page may have further owners, who read it.
    """
    done, kv, pool, stats = list(sequences), state.kv, state.pool, state.stats
    while True:
        budget, rows = state.config.max_num_batched_tokens, []
        for i, sequence in enumerate(done):
            count = min(budget, sequence.todo - keep_back)
            if count > 0 and len(rows) < state.config.max_num_seqs:
                rows.append((i, count))
                budget -= count
        if not rows:
            return replace(state, kv=kv, pool=pool, stats=stats), done
        for i, count in rows if not shared else ():  # of shared pages `offered` required it
            require_writable(pool.pages, written_pages(done[i], count, state.config.page_size).tolist())
        _, kv = executor_of(state).prefill(model, kv, [(done[i], count) for i, count in rows], draw=False, frames=pool.frames)
        for i, count in rows:
            prompt, again = counted(done[i], count)
            stats = stats.add(prefill_tokens=prompt, decode_tokens=count - prompt, rerun_tokens=again)
            done[i] = done[i].advance(count)
            pool = pools.insert(pool, done[i].tokens.array(0, done[i].num_exact), done[i].pages.array(), done[i].request.namespace)


def run_again(model: Model, state: EngineState, sequence: Sequence, places: np.ndarray) -> None:
    """Run some tokens of a filled sequence again, in place. Donates the KV.

    Each token attends to all tokens before it, whether they run again or not. Neighbouring tokens are one row of a batch.
    Every layer writes the KV of the whole batch before any row attends, so batching rows does not change the result.

    Args:
        places: The indices of the tokens, ascending.
    """
    budget, size = state.config.max_num_batched_tokens, state.config.page_size
    runs = [run for run in np.split(places, np.flatnonzero(np.diff(places) != 1) + 1) if len(run)]
    pieces = [run[at : at + budget] for run in runs for at in range(0, len(run), budget)]
    batch: list[tuple[Sequence, int]] = []
    for i, piece in enumerate(pieces):
        start, stop = int(piece[0]), int(piece[-1]) + 1
        require_writable(state.pool.pages, sequence.pages.array(start // size, -(-stop // size)).tolist())
        batch.append((replace(sequence, tokens=sequence.tokens.truncate(stop), num_filled=start), stop - start))
        following = len(pieces[i + 1]) if i + 1 < len(pieces) else budget
        if sum(count for _, count in batch) + following > budget or len(batch) == state.config.max_num_seqs:
            executor_of(state).prefill(model, state.kv, batch, draw=False, frames=state.pool.frames)
            batch = []


@mirrored
@explain_unknown_keywords
@torch.no_grad()
def prefill(
    model: Model, state: EngineState, text_or_ids: Any, after: Chunk | None = None, *, namespace: int = 0
) -> tuple[EngineState, Chunk]:
    """Fill the KV of a context and return the whole of it as a chunk.

    Donates `state`. Pages of a prefix that the prefix index holds are shared and not run again.

    Args:
        model: The model of `init_state`.
        state: The newest state of the engine.
        text_or_ids: A text, token ids (a list, tuple or integer array), or a list of these. Its first part may be a chunk.
        after: A chunk that the new tokens follow. It stays valid, and the result shares its pages.
        namespace: A number of at least 0. Indexed KV is shared only with requests and calls of the same number.

    Returns:
        The next state, and a chunk of all tokens: the tokens of `after` first, then the new ones.

    Raises:
        InvalidRequestError: The context is empty, is not text or token ids, or has more tokens than the engine can ever hold.
        OutOfPagesError: Too few pages are available now.
        DonatedStateError: `state` was donated to a later call.
        ReleasedChunkError: A chunk in the context was released.
        ForeignChunkError: A chunk in the context belongs to another engine.

    Examples:
        >>> state, facts = nv.prefill(model, state, "The king of Aistonia is Oswin.")
        >>> state, both = nv.prefill(model, state, " The capital is Velmora.", after=facts)
        >>> len(facts), len(both)
        (11, 18)
        >>> model.tokenizer.decode(both.token_ids)
        'The king of Aistonia is Oswin. The capital is Velmora.'
    """
    state = enter_with(model, state)
    require_namespace(namespace)
    if after is not None:
        require_chunk(after, "after")
        text_or_ids = [after, *parts_of(text_or_ids)]
    resolved = resolve(model, state, text_or_ids)
    num_tokens, limit = len(resolved.tokens), capacity(state, resolved.base)
    if num_tokens > limit:
        raise InvalidRequestError(f"the chunk would have {resolved.count} tokens; this engine holds at most {limit}")
    state, base = resident(state, resolved.base), resolved.base
    with guarded(state) as taken:
        filled, sequences = adopt(state, [plain_sequence(resolved.tokens, base and state.chunks[base.liveness], namespace)])
        filled, sequences = reserve_all(filled, sequences, [num_tokens], taken)
        filled, (sequence,) = fill(model, filled, sequences)
        filled, chunk = chunk_of(model, filled, sequence)
        return commit_state(filled), chunk
