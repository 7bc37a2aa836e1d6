"""Drive `forward` by hand: put sequences into scattered pages, prefill them in pieces of any size, and decode them in one batch."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from nanovllm.models.common.batch import Batch
from nanovllm.models.model import Model
from nanovllm.state.kv_cache import KVState, init_kv, pages_for
from nanovllm.types import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """KV memory and the pages of each row, in random order so that consecutive pages are rarely neighbours."""

    kv: KVState
    tables: tuple[tuple[int, ...], ...]
    page_size: int


def layout(model: Model, capacities: Sequence[int], page_size: int, seed: int = 0) -> Layout:
    """Return KV memory with room for rows of these numbers of tokens."""
    counts = [pages_for(capacity, page_size) for capacity in capacities]
    free = random.Random(seed).sample(range(sum(counts)), sum(counts))
    tables = tuple(tuple(free.pop() for _ in range(count)) for count in counts)
    kv = init_kv(model.config, num_pages=sum(counts), page_size=page_size, dtype=model.dtype, device=model.device)
    return Layout(kv=kv, tables=tables, page_size=page_size)


def step_batch(at: Layout, pieces: Sequence[tuple[int, Sequence[int], int]], device: torch.device, *, decode: bool = False) -> Batch:
    """Return the batch of one step that runs pieces `(row, ids, start)`: token ids at positions `start, start + 1, ...` of a row."""

    def ints(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def slot(row: int, position: int) -> int:
        return at.tables[row][position // at.page_size] * at.page_size + position % at.page_size

    dummy, width = at.kv.pools[0].shape[1] - 1, max(len(at.tables[row]) for row, _, _ in pieces)
    places = [(row, start + i) for row, ids, start in pieces for i in range(len(ids))]
    bounds = [0]
    for _, ids, _ in pieces:
        bounds.append(bounds[-1] + len(ids))
    return Batch(
        input_ids=ints([token for _, ids, _ in pieces for token in ids]),
        positions=ints([position for _, position in places]),
        slots=ints([slot(row, position) for row, position in places]),
        page_tables=ints([[*at.tables[row], *[dummy] * (width - len(at.tables[row]))] for row, _, _ in pieces]),
        seq_lens=ints([start + len(ids) for _, ids, start in pieces]),
        cu_seqlens=None if decode else ints(bounds),
    )


def run_chunks(
    model: Model, rows: Sequence[Sequence[int]], at: Layout, chunk: int, layer: Callable[..., Tensor] | None = None
) -> list[Tensor]:
    """Prefill all rows together, at most `chunk` tokens of each row per step, and return each row's logits, `[len(row), V]`."""
    logits: list[list[Tensor]] = [[] for _ in rows]
    for start in range(0, max(map(len, rows)), chunk):
        pieces = [(i, row[start : start + chunk], start) for i, row in enumerate(rows) if start < len(row)]
        out, _ = model.spec.forward(
            model.params, at.kv, step_batch(at, pieces, model.device), model.config, layer=layer or model.spec.layer
        )
        for (i, ids, _), part in zip(pieces, out.split([len(ids) for _, ids, _ in pieces]), strict=True):
            assert len(part) == len(ids)
            logits[i].append(part)
    return [torch.cat(parts) for parts in logits]


def run_greedy(
    model: Model,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    page_size: int = 4,
    chunk: int = 64,
    layer: Callable[..., Tensor] | None = None,
) -> tuple[list[list[int]], list[Tensor]]:
    """Decode all prompts greedily in one batch, and return each row's new token ids and their logits `[num_tokens, V]`."""
    at = layout(model, [len(prompt) + num_tokens for prompt in prompts], page_size)
    last = [logits[-1] for logits in run_chunks(model, prompts, at, chunk, layer)]
    seen = [[row] for row in last]
    ids = [[int(row.argmax())] for row in last]
    for step in range(num_tokens - 1):
        pieces = [(i, [ids[i][-1]], len(prompt) + step) for i, prompt in enumerate(prompts)]
        batch = step_batch(at, pieces, model.device, decode=True)
        out, _ = model.spec.forward(model.params, at.kv, batch, model.config, layer=layer or model.spec.layer)
        for i, row in enumerate(out):
            seen[i].append(row)
            ids[i].append(int(row.argmax()))
    return ids, [torch.stack(rows) for rows in seen]
