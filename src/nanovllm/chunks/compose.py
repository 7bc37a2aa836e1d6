"""Chunks made of chunks: `compose` places them one after another, `drop` takes a span out. What moves is copied, the sources stay."""

import math
import operator
import reprlib
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from nanovllm import ops
from nanovllm.chunks.handles import chunk_of, cut, cut_live, fork
from nanovllm.chunks.layout import Layout, gapped, joined, shifted, slots_of
from nanovllm.chunks.prefill import adopt, fill, plain_request, plain_sequence, reserve_all, run_again
from nanovllm.engine.donation import commit_state, enter_with, guarded, require_chunk, require_live
from nanovllm.engine.requests import capacity
from nanovllm.errors import InvalidRequestError
from nanovllm.models.model import Model
from nanovllm.sampling.keywords import explain_unknown_keywords
from nanovllm.state import pages as page_ops
from nanovllm.state import pool as pools
from nanovllm.state.chunk import Chunk, Provenance
from nanovllm.state.engine_state import EngineState, windowed_pools
from nanovllm.state.pool import Taken
from nanovllm.state.request import Sequence
from nanovllm.state.vector import IntVector
from nanovllm.state.window_frames import frame_slots

MODES = ("recompute", "shift", "gap")
PROBED = 2  # layers that are run to choose tokens by deviation: KV of the first does not depend on what stands before


@explain_unknown_keywords
@torch.no_grad()
def compose(model: Model, state: EngineState, chunks: Seq[Chunk], recompute: int | float | Literal["all"] = 0) -> tuple[EngineState, Chunk]:
    """Place chunks one after another, in any order and each any number of times: one chunk of all their tokens.

    The first keeps its place and its whole pages are shared; keys of the others are turned for their new positions and copied into fresh
    pages. They never attended to what now stands before them, so the result is approximate. `recompute` runs some of their tokens
    again, in place: 0 none, k the first k of each (Hu et al., 2024, "EPIC"), a fraction those whose KV deviates most (Yao et al., 2024,
    "CacheBlend"; two layers run over all moved tokens to find them), "all" every token, which is exact. `state.stats` counts what was
    run, and what was probed so.

    Raises `InvalidRequestError` for what can never be composed, `OutOfPagesError` where pages do not suffice now, `ReleasedChunkError` and
    `ForeignChunkError` for chunks that cannot be used.
    """
    state = enter_with(model, state)
    if not isinstance(chunks, list | tuple) or not chunks:
        raise InvalidRequestError(f"chunks={reprlib.repr(chunks)} must be a list of at least one chunk")
    for place, chunk in enumerate(chunks):
        require_chunk(chunk, f"chunks[{place}]")
        require_live(state, chunk)
    amount = recompute_amount(recompute)
    num_tokens, first = sum(map(len, chunks)), chunks[0]
    if num_tokens > capacity(state):
        raise InvalidRequestError(f"the chunks have {num_tokens} tokens; this engine holds at most {capacity(state)}")
    if len(chunks) == 1 and not first.gaps:
        return fork(state, first)
    tokens = first.tokens.extend(np.concatenate([chunk.token_ids for chunk in chunks[1:]] or [np.empty(0, np.int32)]))
    with guarded(state) as taken:
        if isinstance(amount, str):
            base = cut(first, first.num_exact, state.config.page_size) if first.num_exact else None
            state, whole = run_after(model, state, base, tokens, taken)
        else:
            require_rotary(model, 'compose with recompute=0; recompute="all" works')
            layout = joined(chunks, tokens, state.config.page_size)
            state, whole = _placed(model, state, layout, f"composed, recompute={amount}", chunks, taken, amount)
        return commit_state(state), whole


@explain_unknown_keywords
@torch.no_grad()
def drop(
    model: Model, state: EngineState, chunk: Chunk, start: int, stop: int, mode: Literal["recompute", "shift", "gap"] = "recompute"
) -> tuple[EngineState, Chunk]:
    """The chunk without its tokens `start ... stop - 1`; `chunk` stays valid.

    `recompute` runs what follows them again, and nothing else: as exact as what stands before. `shift` moves what follows to the places
    that became free, keys turned, and `gap` leaves it at its positions, sharing its pages where the span is whole pages: both
    approximate, because it attended to what is gone. Raises as `compose` does.
    """
    state = enter_with(model, state)
    with guarded(state) as taken:
        state, kept = dropped(model, state, chunk, start, stop, mode, taken)
        return commit_state(state), kept


def dropped(model: Model, state: EngineState, chunk: Chunk, start: int, stop: int, mode: str, taken: Taken) -> tuple[EngineState, Chunk]:
    """`drop`, uncommitted. Pages taken go into `taken`."""
    require_live(state, chunk)
    start, stop = _span(chunk, start, stop)
    if mode not in MODES:
        raise InvalidRequestError(f"mode={mode!r} is not one of {', '.join(MODES)}")
    if stop == len(chunk):
        return cut_live(state, chunk, start)
    if mode == "recompute":
        tokens = chunk.tokens.truncate(start).extend(chunk.tokens.array(stop))
        return run_after(model, state, cut(chunk, start, state.config.page_size) if start else None, tokens, taken)
    if mode == "shift":
        require_rotary(model, 'drop with mode="shift"; "recompute" and "gap" work')
    layout = (shifted if mode == "shift" else gapped)(chunk, start, stop, state.config.page_size)
    return _placed(model, state, layout, f"dropped by {mode}", [chunk], taken)


def require_rotary(model: Model, what: str) -> None:
    """Raise for a model whose keys cannot be turned: learned positions, or rotation speeds that depend on the length."""
    if model.foreign:
        raise InvalidRequestError(f"how positions enter {model.config.architecture} is not known here, which does not allow {what}")
    if not model.config.keys_turn:
        raise InvalidRequestError(f"{model.name} has {model.config.rope.kind} positions, which do not allow {what}")


def recompute_amount(value: Any) -> int | float | str:
    """What `compose` may be asked to run again: a number of tokens, a fraction between 0 and 1, or "all"; raises for anything else."""
    if value == "all" and isinstance(value, str):
        return value
    if isinstance(value, float) and 0 < value < 1:
        return value
    try:
        count = -1 if isinstance(value, bool | float) else operator.index(value)
    except TypeError:
        count = -1
    if count < 0:
        raise InvalidRequestError(f'recompute={value!r} must be 0, a number of tokens, a fraction between 0 and 1, or "all"')
    return count


def _span(chunk: Chunk, start: Any, stop: Any) -> tuple[int, int]:
    try:
        span = operator.index(start), operator.index(stop)
    except TypeError:
        span = 0, 0
    if not 0 <= span[0] < span[1] <= len(chunk) or span == (0, len(chunk)):
        raise InvalidRequestError(f"start={start!r}, stop={stop!r} must name some and not all of the {len(chunk)} tokens of the chunk")
    return span


def _placed(
    model: Model,
    state: EngineState,
    layout: Layout,
    operation: str,
    sources: Seq[Chunk],
    taken: Taken,
    recompute: int | float = 0,
) -> tuple[EngineState, Chunk]:
    """Build the run, uncommitted: pages, moves, tokens to run again, the chunk."""
    total = len(layout.tokens)
    # Free pages are written while the host counts their owners: nobody has KV in them. Others are not taken over before that.
    early = page_ops.upcoming(state.pool.pages, layout.num_fresh) if state.pool.frames is None else None
    if early is not None:
        _move(model, state, layout, early)
    pool = pools.acquire(state.pool, [*layout.head.tolist(), *layout.tail.tolist()])
    found = pools.allocate(pool, layout.num_fresh)
    if found is None:
        raise pools.too_few(pool, f"the chunk needs {layout.num_fresh} pages")
    pool, fresh = found
    taken.note(pool, fresh)
    if early is None:
        _move(model, replace(state, pool=pool), layout, fresh)
    pages = IntVector.of(np.concatenate((layout.head, np.array(fresh, np.int32), layout.tail)))
    operations = dict.fromkeys((*(name for source in sources for name in source.provenance.operations), operation))
    sequence = Sequence(
        request=plain_request(total), tokens=layout.tokens, pages=pages, num_filled=total, most_filled=total,
        provenance=Provenance(operations=tuple(operations)), exact_len=layout.num_exact, gaps=layout.gaps,
    )  # fmt: skip
    state = replace(state, pool=pool)
    places = _chosen(model, state, sequence, sources, recompute)
    run_again(model, state, sequence, places)
    probed = total - len(sources[0]) if isinstance(recompute, float) else 0
    stats = state.stats.add(prefill_tokens=len(places), reused_tokens=total - len(places), probed_tokens=probed)
    state = replace(state, stats=stats)
    return chunk_of(model, state, sequence)


def _move(model: Model, state: EngineState, layout: Layout, fresh: tuple[int, ...]) -> None:
    """Copy what goes into fresh pages there. Donates the KV."""
    count = len(layout.source)
    if not count:
        return
    moves = torch.empty(1 + 2 * len(state.kv.pools), count, dtype=torch.int32, pin_memory=model.device.type == "cuda")
    target = slots_of(np.array(fresh, np.int32), state.config.page_size)[:count]  # what moves begins with the first of them
    moves[0].numpy()[:] = layout.shift
    windowed = windowed_pools(state)
    for pool, framed in enumerate(windowed):
        frames = state.pool.frames if framed else None
        for row, slots in enumerate((layout.source, target), 1 + 2 * pool):
            moves[row].numpy()[:] = slots if frames is None else frame_slots(frames, slots, state.config.page_size)
    shift, *slots = moves.to(model.device, non_blocking=True).unbind(0)
    for pool, (pages, framed) in enumerate(zip(state.kv.pools, windowed, strict=True)):
        local = model.params.local_inv_freq if framed else None  # by which layers with a window turn, where they have speeds of their own
        ops.move_kv(pages, slots[2 * pool], slots[2 * pool + 1], shift, model.params.inv_freq if local is None else local)


def _chosen(model: Model, state: EngineState, sequence: Sequence, chunks: Seq[Chunk], recompute: int | float) -> np.ndarray:
    """The tokens to run again, in order."""
    starts = np.cumsum([len(chunk) for chunk in chunks])[:-1]
    if isinstance(recompute, float):
        total = len(sequence.tokens)
        count = math.ceil(recompute * (total - len(chunks[0])))
        deviation = _deviation(model, state, sequence, len(chunks[0]))
        return np.sort(np.argsort(-deviation, kind="stable")[:count]) + len(chunks[0])
    heads = [np.arange(start, start + min(recompute, len(chunk))) for start, chunk in zip(starts, chunks[1:], strict=True)]
    return np.concatenate(heads) if heads else np.empty(0, np.int64)


def _deviation(model: Model, state: EngineState, sequence: Sequence, start: int) -> np.ndarray:
    """How far KV of each token from `start` on is from what it would be in its place: squared distance in the last layer probed.

    It runs the first layers over these tokens, in place: their KV there is the better for it.
    """
    probe = replace(model, params=replace(model.params, layers=model.params.layers[:PROBED]))
    (pool, index), size = model.config.places[len(probe.params.layers) - 1], state.config.page_size
    at, held = np.arange(start, len(sequence.tokens)), sequence.pages.array()
    if windowed_pools(state)[pool] and state.pool.frames is not None:
        held = state.pool.frames.of(held)
    pages, inside = (torch.from_numpy(part.astype(np.int64)).to(model.device) for part in (held[at // size], at % size))

    def there() -> torch.Tensor:
        return state.kv.pools[pool][index, pages, :, :, inside].float()

    before = there()
    run_again(probe, state, sequence, at)
    return (there() - before).square().flatten(1).sum(1).cpu().numpy()


def run_after(model: Model, state: EngineState, base: Chunk | None, tokens: IntVector, taken: Taken) -> tuple[EngineState, Chunk]:
    """A chunk of all tokens, those behind `base` run now; uncommitted. Pages taken go into `taken`."""
    if len(tokens) > capacity(state, base):
        raise InvalidRequestError(f"the chunk would have {len(tokens)} tokens; this engine holds at most {capacity(state, base)}")
    filled, sequences = adopt(state, [plain_sequence(tokens, base)])
    filled, sequences = reserve_all(filled, sequences, [len(tokens)], taken)
    filled, (sequence,) = fill(model, filled, sequences)
    return chunk_of(model, filled, sequence)
