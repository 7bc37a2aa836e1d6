"""Errors of operations on chunks.

Exact operations are compared with a fresh prefill. Operations that move keys are compared with keys computed at their new positions.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from nanovllm.chunks.compose import compose, drop
from nanovllm.chunks.handles import fork, truncate
from nanovllm.chunks.prefill import prefill
from nanovllm.chunks.storage.file import load_chunk, save_chunk
from nanovllm.engine.init_state import init_state
from nanovllm.errors import InvalidRequestError
from nanovllm.models.model import Model
from nanovllm.state.chunk import Chunk
from nanovllm.state.engine_state import EngineState, windowed_pools
from nanovllm.testing.driver import layout, step_batch
from nanovllm.types import Tensor
from tests.parity.pair import Pair
from tests.parity.replies import NUM_PAGES, PAGE_SIZE

LENGTHS = (21, 13, 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkErrors:
    """The largest differences of keys and values, relative to the largest value of a layer.

    `exact` is the error after exact operations, `moved` the error after operations that rotate keys. `refused` is the reason why the model
    does not allow the latter, or empty.
    """

    exact: float
    moved: float
    refused: str


def chunk_errors(pair: Pair) -> ChunkErrors:
    """Run `fork`, `truncate`, `drop`, `compose`, `save_chunk` and `load_chunk` on a model, and return their errors."""
    model, runs = pair.ours, pair.draw(4, *LENGTHS)
    state = init_state(model, num_pages=NUM_PAGES, page_size=PAGE_SIZE, max_num_batched_tokens=16)
    chunks = []
    for run in runs:
        state, chunk = prefill(model, state, run)
        chunks.append(chunk)
    state, whole = compose(model, state, chunks, recompute="all")
    state, twin = fork(state, whole)
    state, short = truncate(state, twin, 30)
    state, without = drop(model, state, whole, 5, 26)
    with tempfile.TemporaryDirectory() as folder:
        save_chunk(state, short, Path(folder) / "chunk.safetensors")
        state, loaded = load_chunk(model, state, Path(folder) / "chunk.safetensors")
    exact = max(_far(kv_of(state, chunk), _fresh(model, chunk.token_ids.tolist())) for chunk in (whole, twin, short, without, loaded))
    try:
        state, placed = compose(model, state, chunks, recompute=0)
        state, shifted = drop(model, state, whole, 5, 26, mode="shift")
    except InvalidRequestError as error:
        return ChunkErrors(exact=exact, moved=0.0, refused=str(error))
    starts = np.cumsum([0, *LENGTHS])
    composed = kv_of(state, placed)
    pieces = [_far(composed[:, start : start + len(run)], run_at(model, run, int(start))) for run, start in zip(runs, starts, strict=False)]
    # Tokens after the dropped span have attended to it. So they keep the values of the whole chunk, and their keys are rotated.
    kept, rotated = kv_of(state, whole)[:, 26:], kv_of(state, shifted)[:, 5:]
    pieces += [_far(rotated[:, :, 1], kept[:, :, 1]), _products(rotated[:, :, 0], kept[:, :, 0])]
    state, _ = compose(model, state, chunks, recompute=0.3)
    return ChunkErrors(exact=exact, moved=max(pieces), refused="")


def kv_of(state: EngineState, chunk: Chunk) -> Tensor:
    """Return keys and values of a chunk's tokens, `[L, T, 2, K, D]`."""
    size, at, table, frames = state.config.page_size, np.arange(len(chunk)), chunk.pages.array(), state.pool.frames
    by_pool = []
    for pool, framed in zip(state.kv.pools, windowed_pools(state), strict=True):
        pages = (frames.of(table) if framed and frames is not None else table)[at // size].astype(np.int64)
        by_pool.append(pool.permute(0, 1, 4, 2, 3, 5)[:, torch.from_numpy(pages), torch.from_numpy(at % size)])
    return torch.stack([by_pool[pool][index] for pool, index in state.runtime.lease.model.places])


def run_at(model: Model, tokens: Sequence[int], start: int) -> Tensor:
    """Run tokens at positions `start, start + 1, ...` without earlier tokens; return their keys and values `[L, T, 2, K, D]`."""
    at = layout(model, [len(tokens)], len(tokens))
    batch = step_batch(at, [(0, tokens, 0)], model.device)
    model.spec.forward(model.params, at.kv, replace(batch, positions=batch.positions + start), model.config)
    pages = torch.stack([at.kv.pools[pool][index, at.tables[0][0]] for pool, index in model.config.places])
    return pages.permute(0, 3, 1, 2, 4).clone()


def _fresh(model: Model, tokens: list[int]) -> Tensor:
    state = init_state(model, num_pages=NUM_PAGES, page_size=PAGE_SIZE)
    state, chunk = prefill(model, state, tokens)
    return kv_of(state, chunk)


def _products(x: Tensor, y: Tensor) -> float:
    """Return the difference of the dot products of all pairs of keys, which do not change if all keys are rotated by the same amount."""
    return _far(*(torch.einsum("ltkd,lskd->lkts", keys.double(), keys.double()) for keys in (x, y)))


def _far(x: Tensor, y: Tensor) -> float:
    """Return the largest difference in any layer, relative to the largest value of that layer."""
    differences, sizes = (each.double().abs().flatten(1).amax(1) for each in (x - y, y))
    return (differences / sizes).max().item()
