"""`GET /v1/memory`: the figures of `nanovllm.memory`, and under a key nothing of others but counts."""

import hashlib
import json
import threading
import timeit
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import nanovllm as nv
from nanovllm.entrypoints.memory.pages import ranges
from nanovllm.entrypoints.memory.report import drafts_of
from nanovllm.entrypoints.memory.text import describe, outline
from nanovllm.entrypoints.memory.tree import path_to
from nanovllm.entrypoints.server import memory_calls
from nanovllm.entrypoints.server.memory_calls import KINDS, looks
from nanovllm.entrypoints.server.settings import Settings
from nanovllm.state.prefix_cache import ROOT, init_prefix, insert, set_idle
from tests.entrypoints.server.live import Live

pytestmark = pytest.mark.unhooked
LONG = "The king of Aistonia is Oswin, and the capital of Aistonia is Velmora. "
KEYS = ("one", "two")


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with Live(num_pages=64) as server:
        yield server


def cells(given: list[list[Any]]) -> list[tuple[str, int]]:
    return [(kind, count) for kind, count, times in given for _ in range(times)]


def seen(live: Live, key: str = "") -> dict[str, Any]:
    answer = live.call("GET", "/v1/memory", headers={"authorization": f"Bearer {key}"} if key else {})
    assert answer.status == 200, answer
    return answer.json()


def test_it_has_the_figures_map_and_tree_of_the_library(live: Live) -> None:
    assert seen(live)["pages"] == {"total": 64, **dict.fromkeys(KINDS, 0), "free": 64} and seen(live)["tree"] == []
    for name, body in {"king": {"text": LONG * 4}, "more": {"text": "And more.", "after": "king"}, "other": {"text": LONG}}.items():
        assert live.post("/v1/chunks", {"name": name, **body}).status == 200
    assert live.post("/v1/chunks/king/fork", {"to": "twin"}).status == 200
    assert live.post("/v1/completions", {"chunks": ["king", "other"], "prompt": " x", "max_tokens": 2}).status == 200
    assert live.post("/v1/completions", {"prompt": "Once upon a time " * 20, "max_tokens": 2}).status == 200
    live.wait_until_idle()
    named = live.engine.named
    names = {name: entry.chunk for name, entry in named.space("").items()} | {"king + other": named.composed[0].chunk}
    found, report = seen(live), nv.memory(live.engine.state, names=names)
    counts = {"total": 64, "free": report.num_free, "index": report.num_idle, "chunks": report.num_chunk}
    assert found["pages"] == {**dict.fromkeys(KINDS, 0), **counts} and report.num_idle > 0
    assert (found["shared"], found["saved"], found["page_bytes"]) == (report.num_shared, report.num_saved, report.page_bytes)
    kinds = ["index" if page in report.idle else "chunks" if owners else "free" for page, owners in enumerate(report.page_owners)]
    wanted = list(zip(kinds, map(len, report.page_owners), strict=True))
    assert found["map"]["pages_per_cell"] == 1 and cells(found["map"]["cells"]) == wanted
    lines = [(len(line.trail) - 1, describe(report, line)) for line in outline(report)]
    assert [(line["level"], line["text"]) for line in found["tree"]] == lines
    assert "king + other (" in json.dumps(lines) and "only in the index" in json.dumps(lines)
    for line in found["tree"]:
        pages = [page for run in report.runs if ranges(run.pages, 3) == line["pages"] for page in run.pages]
        assert cells(line["looks"]) == [wanted[page] for page in pages]
    for name in ("king", "twin", "more", "other"):
        live.call("DELETE", f"/v1/chunks/{name}")


def test_a_reply_that_runs_is_a_request(live: Live) -> None:
    asking = threading.Thread(target=live.post, args=("/v1/completions", {"prompt": "Once", "max_tokens": 900, "ignore_eos": True}))
    asking.start()
    live.wait_until_running()
    found = seen(live)
    asking.join()
    assert found["pages"]["requests"] > 0 and any("running" in line["text"] for line in found["tree"])
    live.wait_until_idle()


def test_a_key_sees_its_own_and_only_counts_of_others() -> None:
    settings = Settings(shutdown_seconds=1.0, api_keys=tuple(hashlib.sha256(key.encode()).digest() for key in KEYS))
    with Live(settings=settings, num_pages=64) as live:
        one, two = ({"authorization": f"Bearer {key}"} for key in KEYS)
        assert live.call("GET", "/v1/memory").status == 401
        for name, headers in (("mine", one), ("secret", two), ("secret-too", two)):
            assert live.call("POST", "/v1/chunks", {"name": name, "text": LONG * 2}, headers).status == 200
        assert live.call("POST", "/v1/completions", {"prompt": LONG * 3, "max_tokens": 2}, two).status == 200
        live.wait_until_idle()
        mine, theirs = seen(live, "one"), seen(live, "two")
        assert "secret" not in json.dumps(mine) and "mine" not in json.dumps(theirs)
        assert mine["pages"]["others"] == theirs["pages"]["chunks"] and theirs["pages"]["others"] == mine["pages"]["chunks"] > 0
        assert {count for kind, count in cells(mine["map"]["cells"]) if kind == "others"} == {0}, "not even how many own a page"
        assert len(mine["tree"]) == 1 and "mine (" in mine["tree"][0]["text"]
        assert any("only in the index" in line["text"] for line in theirs["tree"])
        assert mine["pages"]["index"] == theirs["pages"]["index"] > 0


def test_cells_of_several_pages_show_most_of_them(monkeypatch: pytest.MonkeyPatch, live: Live) -> None:
    monkeypatch.setattr(memory_calls, "MOST_CELLS", 16)
    assert live.post("/v1/chunks", {"name": "king", "text": LONG * 4}).status == 200
    found, (kinds, counts) = seen(live), looks(live.engine.state, drafts_of(live.engine.state))
    assert found["map"]["pages_per_cell"] == 4
    for place, cell in enumerate(cells(found["map"]["cells"])):
        codes = list(zip(kinds[4 * place : 4 * place + 4].tolist(), counts[4 * place : 4 * place + 4].tolist(), strict=True))
        assert Counter(codes)[KINDS.index(cell[0]), cell[1]] == max(Counter(codes).values())
    live.call("DELETE", "/v1/chunks/king")


def test_large_cells_end_where_the_free_pages_begin_that_are_only_counted() -> None:
    kinds = np.zeros(50_000, int)
    kinds[: memory_calls.MOST_CELLS + 2] = KINDS.index("chunks")
    found = memory_calls._map(kinds, kinds.astype(bool).astype(int))
    shown = cells(found["cells"])
    assert found["pages_per_cell"] == 2 and shown == [("chunks", 1)] * (memory_calls.MOST_CELLS // 2 + 1)
    assert 2 * len(shown) + found["more_free"] == 50_000


def test_prefixes_of_others_are_not_looked_at_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest prefix is the client's, those before it are of others, and the oldest one, which is not found, is the client's again."""
    num, size, index, looked_at = 1000, 4, init_prefix(1000, 4), list[int]()
    for page in range(num):
        own = page in (0, num - 1)
        index, new = insert(index, np.full(size, page, np.int32), np.array([page], np.int32), ROOT - (1 if own else 2))
        index = set_idle(index, new)
    monkeypatch.setattr(memory_calls, "path_to", lambda *given: (looked_at.append(1), path_to(*given))[1])
    state: Any = SimpleNamespace(prefix=index, config=SimpleNamespace(num_pages=num))
    assert memory_calls._idle(state, 1) == [(num - 1,)] and len(looked_at) == memory_calls.MOST_LOOKED_AT
    assert len(memory_calls._idle(state, None)) == memory_calls.MOST_IDLE


def test_it_is_quick_with_many_pages_and_bounded_with_many_chunks() -> None:
    with Live(num_pages=60_000, settings=Settings(shutdown_seconds=1.0, max_chunks=400)) as live:
        for place in range(150):
            assert live.post("/v1/chunks", {"name": f"c{place}", "text": f"{place}: {LONG}"}).status == 200
        found = seen(live)
        assert found["more_owners"] == 150 - memory_calls.MOST_OWNERS and len(found["tree"]) <= 65
        shown = cells(found["map"]["cells"])
        assert memory_calls.FEWEST_CELLS <= len(shown) <= memory_calls.MOST_CELLS and shown[-1][0] == "chunks"
        assert found["map"]["pages_per_cell"] * len(shown) + found["map"]["more_free"] == 60_000, "free pages hide no others"
        assert found["pages"]["chunks"] == int(np.sum([len(chunk.pages) for chunk in live.engine.state.chunks.values()]))
        assert min(timeit.repeat(lambda: seen(live), number=1, repeat=5)) < 0.5  # seconds for which steps may wait, with much to spare
