"""Chunks made from chunks: `compose` joins them, `drop` removes a span. Moved KV is copied; the sources stay valid."""

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
from nanovllm.engine.donation import commit_state, enter_with, guarded, require_chunk, require_live, require_namespace
from nanovllm.engine.host_copies import copied, settled
from nanovllm.engine.mirrored import mirrored
from nanovllm.engine.requests import capacity
from nanovllm.engine.resident import resident
from nanovllm.errors import InvalidRequestError
from nanovllm.models.model import Model
from nanovllm.ops.distributed.collectives import all_reduce
from nanovllm.ops.kv_cache.fp8 import in_fp8, read_tokens
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
PROBED = 2  # layers that run to choose tokens by deviation; the KV of the first layer does not depend on earlier tokens


@mirrored
@explain_unknown_keywords
@torch.no_grad()
def compose(
    model: Model, state: EngineState, chunks: Seq[Chunk], recompute: int | float | Literal["all"] = 0, *, namespace: int = 0
) -> tuple[EngineState, Chunk]:
    r"""Join chunks in any order; a chunk may occur several times.

    Donates `state`. The first chunk keeps its positions, and its whole pages are shared. The keys of the others are rotated to their new
    positions and copied into fresh pages. These chunks never attended to the tokens that now precede them, so the result is approximate
    unless `recompute="all"`. `state.stats` counts the tokens that were run, reused and probed.

    Args:
        model: The model of `init_state`.
        state: The newest state of the engine.
        chunks: A list or tuple of at least one chunk. All stay valid.
        recompute: The tokens of the second and later chunks that run again, in place. 0: none. An integer k: the first k of each chunk
            (Hu et al., 2024, "EPIC"). A fraction between 0 and 1: the tokens whose KV deviates most, which two layers over all moved
            tokens find (Yao et al., 2024, "CacheBlend"). "all": every token that is not exact, for an exact result.
        namespace: A number of at least 0. Indexed KV is shared only with requests and calls of the same number.

    Returns:
        The next state, and one chunk of all tokens. Its `provenance` names this operation if it is approximate.

    Raises:
        InvalidRequestError: An argument is invalid, the result is too long for the engine, or the model's keys cannot be rotated.
        OutOfPagesError: Too few pages are available now.
        DonatedStateError: `state` was donated to a later call.
        ReleasedChunkError: A chunk was released.
        ForeignChunkError: A chunk belongs to another engine.

    Examples:
        >>> state, king = nv.prefill(model, state, "The king of Aistonia is Oswin.")
        >>> state, city = nv.prefill(model, state, "\n\nThe capital of Aistonia is Velmora.")
        >>> state, both = nv.compose(model, state, [king, city])
        >>> len(both), str(both.provenance)
        (23, 'approximate: composed, recompute=0')
        >>> greedy = nv.SamplingParams(temperature=0, max_tokens=8, stop=".")
        >>> state, reply = nv.generate(model, state, [both, "\n\nThe capital of Aistonia is"], greedy)
        >>> reply.text
        ' Velmora'
    """
    state = enter_with(model, state)
    require_namespace(namespace)
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
    state = resident(state, chunks)
    chunks = [require_live(state, chunk) for chunk in chunks]
    first = chunks[0]
    tokens = first.tokens.extend(np.concatenate([chunk.token_ids for chunk in chunks[1:]] or [np.empty(0, np.int32)]))
    with guarded(state) as taken:
        if isinstance(amount, str):
            base = cut(first, first.num_exact, state.config.page_size) if first.num_exact else None
            state, whole = run_after(model, state, base, tokens, taken, namespace)
        else:
            require_rotary(model, 'compose with recompute=0; recompute="all" works')
            layout = joined(chunks, tokens, state.config.page_size)
            state, whole = _placed(model, state, layout, f"composed, recompute={amount}", chunks, taken, namespace, amount)
        return commit_state(state), whole


@mirrored
@explain_unknown_keywords
@torch.no_grad()
def drop(
    model: Model,
    state: EngineState,
    chunk: Chunk,
    start: int,
    stop: int,
    mode: Literal["recompute", "shift", "gap"] = "recompute",
    *,
    namespace: int = 0,
) -> tuple[EngineState, Chunk]:
    """Make a chunk without the tokens `start ... stop - 1`.

    Donates `state`. The modes differ in how they treat the tokens after the span:

    - `"recompute"` runs them again. The result is as exact as the tokens before the span.
    - `"shift"` moves them into the free positions by rotating their keys. The result is approximate.
    - `"gap"` leaves them at their positions. The result is approximate. Their pages are shared if the span's length is whole pages.

    Args:
        model: The model of `init_state`.
        state: The newest state of the engine.
        chunk: The chunk to edit. It stays valid.
        start: The index of the first token to remove.
        stop: The index after the last token to remove. The span must not cover the whole chunk.
        mode: "recompute", "shift" or "gap".
        namespace: A number of at least 0. Indexed KV is shared only with requests and calls of the same number.

    Returns:
        The next state, and the shorter chunk.

    Raises:
        InvalidRequestError: The span or the mode is invalid, or `"shift"` is used with a model whose keys cannot be rotated.
        OutOfPagesError: Too few pages are available now.
        DonatedStateError: `state` was donated to a later call.
        ReleasedChunkError: `chunk` was released.
        ForeignChunkError: `chunk` belongs to another engine.

    Examples:
        >>> state, king = nv.prefill(model, state, "The king of Aistonia is Oswin.")
        >>> state, both = nv.prefill(model, state, " The capital is Velmora.", after=king)
        >>> state, capital = nv.drop(model, state, both, 0, len(king))
        >>> model.tokenizer.decode(capital.token_ids), str(capital.provenance)
        (' The capital is Velmora.', 'exact')
        >>> state, moved = nv.drop(model, state, both, 0, len(king), mode="shift")
        >>> str(moved.provenance)
        'approximate: dropped by shift'
    """
    state = enter_with(model, state)
    require_namespace(namespace)
    require_live(state, chunk)
    _span(chunk, start, stop)
    state = resident(state, chunk)
    with guarded(state) as taken:
        state, kept = dropped(model, state, chunk, start, stop, mode, taken, namespace)
        return commit_state(state), kept


def dropped(
    model: Model, state: EngineState, chunk: Chunk, start: int, stop: int, mode: str, taken: Taken, namespace: int = 0
) -> tuple[EngineState, Chunk]:
    """`drop` without the commit, of a chunk on the device. Pages that it takes are noted in `taken`."""
    chunk = require_live(state, chunk)
    start, stop = _span(chunk, start, stop)
    if mode not in MODES:
        raise InvalidRequestError(f"mode={mode!r} is not one of {', '.join(MODES)}")
    if stop == len(chunk):
        return cut_live(state, chunk, start)
    if mode == "recompute":
        tokens = chunk.tokens.truncate(start).extend(chunk.tokens.array(stop))
        return run_after(model, state, cut(chunk, start, state.config.page_size) if start else None, tokens, taken, namespace)
    if mode == "shift":
        require_rotary(model, 'drop with mode="shift"; "recompute" and "gap" work')
    layout = (shifted if mode == "shift" else gapped)(chunk, start, stop, state.config.page_size)
    return _placed(model, state, layout, f"dropped by {mode}", [chunk], taken, namespace)


def require_rotary(model: Model, what: str) -> None:
    """Require a model whose keys can be rotated to other positions.

    Raises:
        InvalidRequestError: The positions are learned, or enter through the transformers fallback in a way that is unknown.
    """
    if model.foreign:
        raise InvalidRequestError(f"it is unknown how {model.config.architecture} uses positions, so it does not support {what}")
    if not model.config.keys_turn:
        raise InvalidRequestError(f"{model.name} has {model.config.rope.kind} positions, so it does not support {what}")


def recompute_amount(value: Any) -> int | float | str:
    """Check the `recompute` option of `compose`.

    Returns:
        The number of tokens, the fraction, or "all".

    Raises:
        InvalidRequestError: `value` is something else.
    """
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
        raise InvalidRequestError(f"start={start!r}, stop={stop!r} must select some, but not all, of the chunk's {len(chunk)} tokens")
    return span


def _placed(
    model: Model,
    state: EngineState,
    layout: Layout,
    operation: str,
    sources: Seq[Chunk],
    taken: Taken,
    namespace: int,
    recompute: int | float = 0,
) -> tuple[EngineState, Chunk]:
    """Build the chunk of a layout, without the commit: take pages, move KV, run the chosen tokens again."""
    total = len(layout.tokens)
    # Free pages hold no KV, so the device may write them while the host still counts owners, once those were read of which copies ahead
    # go on. Pages of the index are written later.
    early = page_ops.upcoming(state.pool.pages, layout.num_fresh) if state.pool.frames is None else None
    if early is not None:
        _move(model, copied(state, None, taken, None, early, ()), layout, early)
    pool = pools.acquire(pools.planning(state.pool), [*layout.head.tolist(), *layout.tail.tolist()])
    allocated = pools.allocate(pool, layout.num_fresh)
    if allocated is None:
        raise pools.too_few(pool, f"the chunk needs {layout.num_fresh} pages")
    pool, fresh = allocated
    taken.note(pool, fresh)
    state = settled(state, pool, taken)
    if early is None:
        _move(model, state, layout, fresh)
    pages = IntVector.of(np.concatenate((layout.head, np.array(fresh, np.int32), layout.tail)))
    operations = dict.fromkeys((*(name for source in sources for name in source.provenance.operations), operation))
    sequence = Sequence(
        request=plain_request(total, namespace), tokens=layout.tokens, pages=pages, num_filled=total, most_filled=total,
        provenance=Provenance(operations=tuple(operations)), exact_len=layout.num_exact, gaps=layout.gaps,
    )  # fmt: skip
    places = _chosen(model, state, sequence, sources, recompute)
    run_again(model, state, sequence, places)
    probed = total - len(sources[0]) if isinstance(recompute, float) else 0
    stats = state.stats.add(prefill_tokens=len(places), reused_tokens=total - len(places), probed_tokens=probed)
    state = replace(state, stats=stats)
    return chunk_of(model, state, sequence)


def _move(model: Model, state: EngineState, layout: Layout, fresh: tuple[int, ...]) -> None:
    """Copy the KV of a layout into its fresh pages. Donates the KV."""
    count = len(layout.source)
    if not count:
        return
    moves = torch.empty(1 + 2 * len(state.kv.pools), count, dtype=torch.int32, pin_memory=model.device.type == "cuda")
    target = slots_of(np.array(fresh, np.int32), state.config.page_size)[:count]  # the first fresh page holds the first moved token
    moves[0].numpy()[:] = layout.shift
    windowed = windowed_pools(state)
    for pool, framed in enumerate(windowed):
        frames = state.pool.frames if framed else None
        for row, slots in enumerate((layout.source, target), 1 + 2 * pool):
            moves[row].numpy()[:] = slots if frames is None else frame_slots(frames, slots, state.config.page_size)
    shift, *slots = moves.to(model.device, non_blocking=True).unbind(0)
    for pool, (pages, framed) in enumerate(zip(state.kv.pools, windowed, strict=True)):
        local = model.params.local_inv_freq if framed else None  # frequencies of sliding-window layers, if they have their own
        ops.move_kv(pages, slots[2 * pool], slots[2 * pool + 1], shift, model.params.inv_freq if local is None else local)


def _chosen(model: Model, state: EngineState, sequence: Sequence, chunks: Seq[Chunk], recompute: int | float) -> np.ndarray:
    """The indices of the tokens to run again, ascending."""
    starts = np.cumsum([len(chunk) for chunk in chunks])[:-1]
    if isinstance(recompute, float):
        total = len(sequence.tokens)
        count = math.ceil(recompute * (total - len(chunks[0])))
        deviation = _deviation(model, state, sequence, len(chunks[0]))
        return np.sort(np.argsort(-deviation, kind="stable")[:count]) + len(chunks[0])
    heads = [np.arange(start, start + min(recompute, len(chunk))) for start, chunk in zip(starts, chunks[1:], strict=True)]
    return np.concatenate(heads) if heads else np.empty(0, np.int64)


def _deviation(model: Model, state: EngineState, sequence: Sequence, start: int) -> np.ndarray:
    """How far the stored KV of each token from `start` on is from KV computed in its new context.

    The measure is the squared distance in the last probed layer. The probe runs the first layers over these tokens in place, which makes
    their KV in these layers more exact.
    """
    probe = replace(model, params=replace(model.params, layers=model.params.layers[:PROBED]))
    (pool, index), size = model.config.places[len(probe.params.layers) - 1], state.config.page_size
    at, page_ids = np.arange(start, len(sequence.tokens)), sequence.pages.array()
    if windowed_pools(state)[pool] and state.pool.frames is not None:
        page_ids = state.pool.frames.of(page_ids)
    slots = torch.from_numpy((page_ids[at // size] * size + at % size).astype(np.int32)).to(model.device)

    def kv_of_tokens() -> torch.Tensor:
        layer = state.kv.pools[pool][index]
        if in_fp8(layer):
            codes, scales = read_tokens(layer, slots)
            return codes.float() * scales
        return layer[slots // size, :, :, slots % size].float()

    before = kv_of_tokens()
    run_again(probe, state, sequence, at)
    own = (kv_of_tokens() - before).square().flatten(1).sum(1)
    return all_reduce(own, model.config.mesh).cpu().numpy()  # over the heads of all ranks, so that all choose the same tokens


def run_after(
    model: Model, state: EngineState, base: Chunk | None, tokens: IntVector, taken: Taken, namespace: int = 0
) -> tuple[EngineState, Chunk]:
    """Make a chunk of all tokens by running those after `base`, without the commit. Pages that it takes are noted in `taken`."""
    if len(tokens) > capacity(state, base):
        raise InvalidRequestError(f"the chunk would have {len(tokens)} tokens; this engine holds at most {capacity(state, base)}")
    filled, sequences = adopt(state, [plain_sequence(tokens, base, namespace)])
    filled, sequences = reserve_all(filled, sequences, [len(tokens)], taken)
    filled, (sequence,) = fill(model, filled, sequences)
    return chunk_of(model, filled, sequence)
