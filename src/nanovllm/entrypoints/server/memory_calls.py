"""The engine's function behind `GET /v1/memory`: the page map and the tree of a memory report, as far as a client may see them.

A client sees the chunks and requests of its own namespace. Of all others it sees only which pages they hold.
The map is made by array operations, and the tree has a bounded number of paths, because steps wait meanwhile.
"""

from collections.abc import Iterable
from itertools import groupby
from typing import Any

import numpy as np

from nanovllm.entrypoints.memory.pages import PageFigures, PageOwner, Path, ranges
from nanovllm.entrypoints.memory.report import Draft, by_page, drafts_of, host_pages_of, owners_of, page_bytes
from nanovllm.entrypoints.memory.text import Line, describe, outline
from nanovllm.entrypoints.memory.tree import path_to, tree
from nanovllm.entrypoints.server.held import Held
from nanovllm.entrypoints.server.named_chunks import NamedChunks
from nanovllm.executor.executor import runtime_of
from nanovllm.state.engine_state import EngineState
from nanovllm.state.request import Sequence

KINDS = ("free", "index", "chunks", "requests", "both", "others")
FREE, INDEX, CHUNKS, REQUESTS, BOTH, OTHERS = range(len(KINDS))
FEWEST_CELLS, MOST_CELLS = 256, 1024  # of the map
MOST_OWNERS, MOST_IDLE = 128, 32  # in the tree: owners, and prefixes that only the index holds
MOST_LOOKED_AT = 256  # prefixes, those of others too
MOST_COUNT = 99  # owners of a page that are told apart


def memory(held: Held, *, space: str, namespace: int, everything: bool) -> tuple[Held, dict[str, Any]]:
    """Who owns the pages.

    Args:
        held: What the engine holds.
        space: The namespace of the client's chunks.
        namespace: Whose KV the client's requests share.
        everything: Whether all owners are the client's, because the server has no keys.
    """
    state = held.state
    names = _names(held.named, space)
    own = [draft for draft in drafts_of(state) if everything or _is_own(draft, names, namespace)]
    kinds, counts = looks(state, own)
    shown = own[:MOST_OWNERS]
    owners = owners_of(shown, {(True, number): name for number, name in names.items()}, state.config.num_pages)
    idle = _idle(state, None if everything else namespace)
    counted = np.bincount(kinds, minlength=len(KINDS)).tolist()
    disk = runtime_of(state).disk
    held_by_own = (kinds == CHUNKS) | (kinds == REQUESTS) | (kinds == BOTH)
    return held, {
        "object": "memory",
        "page_size": state.config.page_size,
        "page_bytes": page_bytes(state.kv),
        "pages": {"total": state.config.num_pages, **dict(zip(KINDS, counted, strict=True))},
        "host_pages": dict(zip(("total", "used"), host_pages_of(state), strict=True)),
        "disk": None if disk is None else {"bytes": disk.folder.size, "max_bytes": disk.folder.max_bytes},
        "shared": int((held_by_own & (counts > 1)).sum()),
        "saved": int(counts[held_by_own].sum() - held_by_own.sum()),
        "map": _map(kinds, counts),
        "tree": _tree(state, owners, idle, kinds, counts),
        "more_owners": len(own) - len(shown),
    }


def looks(state: EngineState, own: Iterable[Draft]) -> tuple[np.ndarray, np.ndarray]:
    """For each page its place in `KINDS`, and the number of `own` that own it."""
    total, by_kind = state.config.num_pages, {True: [np.empty(0, np.int32)], False: [np.empty(0, np.int32)]}
    for source, kind, _ in own:
        by_kind[kind == "chunk"].append(source.pages.array())
    chunks, requests = (np.bincount(np.concatenate(by_kind[which]), minlength=total) for which in (True, False))
    references = state.pages.counts.copy()
    owners = references - (state.prefix.run_of.copy() >= 0)  # the index has a reference, but is no owner
    conditions = [(chunks > 0) & (requests > 0), chunks > 0, requests > 0, owners > 0, references > 0]
    return np.select(conditions, [BOTH, CHUNKS, REQUESTS, OTHERS, INDEX], FREE), chunks + requests


def _names(named: NamedChunks, space: str) -> dict[int, str]:
    """What the chunks of a namespace are called, by `liveness`."""
    found = {entry.chunk.liveness: name for name, entry in named.space(space).items()}
    rows = [entry for entry in named.composed if entry.space == space]
    joined = {entry.chunk.liveness: " + ".join(found.get(member, "?") for member in entry.members) for entry in rows}
    return found | joined | {chunk.liveness: "being saved" for own, chunk in named.pinned if own == space}


def _is_own(draft: Draft, names: dict[int, str], namespace: int) -> bool:
    source, _, number = draft
    return source.request.namespace == namespace if isinstance(source, Sequence) else number in names


def _idle(state: EngineState, namespace: int | None) -> list[Path]:
    """Paths to the pages that only the index holds and that were used last, in a namespace or in all.

    After `MOST_LOOKED_AT` paths it gives up, because most may be those of others.
    """
    index, found, looked_at = state.prefix, list[Path](), 0
    seen = np.zeros(state.config.num_pages, bool)
    for time in sorted(index.idle, reverse=True):
        left = index.idle[time]
        while len(left := left[~seen[left]]):
            path, own = path_to(index, left.item(0))  # of pages that became idle together, the last one of a prefix is the first
            seen[path] = True
            looked_at += 1
            if namespace in (None, own):
                found.append(tuple(path.tolist()))
            if len(found) == MOST_IDLE or looked_at == MOST_LOOKED_AT:
                return found
    return found


def _runs(values: Iterable[tuple[int, int]]) -> list[list[Any]]:
    """Kind, number of owners, and how many in a row are alike."""
    return [[KINDS[kind], count, len(list(alike))] for (kind, count), alike in groupby(values)]


def _map(kinds: np.ndarray, counts: np.ndarray) -> dict[str, Any]:
    """The map up to the last page that is used: each cell is one page, or several of which it shows most. Cells that are alike are told
    together."""
    per, used = 1, 1 + int(np.flatnonzero(kinds).max(initial=-1))
    while -(-used // per) > MOST_CELLS:
        per *= 2
    stop, size = min(len(kinds), max(FEWEST_CELLS, -(-used // per)) * per), MOST_COUNT + 1
    codes = (kinds * size + np.minimum(counts, MOST_COUNT))[:stop]
    if per > 1:
        num_codes, cells = len(KINDS) * size, -(-stop // per)
        places = np.arange(len(codes)) // per
        codes = np.bincount(places * num_codes + codes, minlength=cells * num_codes).reshape(cells, num_codes).argmax(1)
    return {"pages_per_cell": per, "cells": _runs(divmod(code, size) for code in codes.tolist()), "more_free": len(kinds) - stop}


def _tree(
    state: EngineState, owners: tuple[PageOwner, ...], idle: list[Path], kinds: np.ndarray, counts: np.ndarray
) -> list[dict[str, Any]]:
    """The lines of the tree, as `nanovllm memory` has them."""
    runs = tree([*((owner.pages, owner) for owner in owners if owner.pages), *((path, None) for path in idle)])
    pages = np.unique(np.concatenate([np.empty(0, int), *(np.asarray(path, int) for path in idle)])).astype(int)
    report = PageFigures(
        page_size=state.config.page_size,
        page_bytes=0,
        owners=owners,
        runs=runs,
        page_owners=by_page(owners, state.config.num_pages),
        idle=frozenset(pages[kinds[pages] == INDEX].tolist()),
        num_indexed=0,
    )
    return [_line(report, line, kinds, counts) for line in outline(report)]


def _line(report: PageFigures, line: Line, kinds: np.ndarray, counts: np.ndarray) -> dict[str, Any]:
    pages = () if line.run is None else line.run.pages
    looks_of = zip(kinds[list(pages)].tolist(), np.minimum(counts[list(pages)], MOST_COUNT).tolist(), strict=True)
    return {"level": len(line.trail) - 1, "pages": ranges(pages, 3), "text": describe(report, line), "looks": _runs(looks_of)}
