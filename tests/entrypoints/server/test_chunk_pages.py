"""Chunks that leave requests no pages: what cannot run now is 503 and says why, what never fits is 400, a reply that is cut says so."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nanovllm as nv
from nanovllm.engine.requests import submit_many
from nanovllm.entrypoints.server.chunk_pages import explained, require_pages
from nanovllm.entrypoints.server.named_chunks import NamedChunks
from nanovllm.entrypoints.server.settings import Settings
from nanovllm.testing.models import random_model, tiny_config
from tests.entrypoints.server.live import LIMIT, Answer, Live

PAGES, SIZE = 32, 16
MODEL = random_model(tiny_config())
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")


@pytest.fixture(scope="module")
def served() -> Iterator[Live]:
    """A server with few pages, all of which chunks may hold."""
    with Live(settings=Settings(shutdown_seconds=1.0, chunk_share=1.0), num_pages=PAGES, page_size=SIZE) as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_left(served: Live) -> Iterator[None]:
    yield
    for chunk in served.get("/v1/chunks").json()["data"]:
        assert served.call("DELETE", f"/v1/chunks/{chunk['name']}").status == 200
    served.wait_until_idle()
    assert served.engine.state.pool.num_available == PAGES and not served.engine.state.chunks


def hold(live: Live, num_pages: int, name: str = "held", first: int = 7) -> list[int]:
    """Make a chunk of so many pages. Returns its tokens."""
    ids = [first, *range(300, 300 + num_pages * SIZE - 1)]
    assert live.post("/v1/chunks", {"name": name, "token_ids": ids}).status == 200
    return ids


def require_busy(answer: Answer) -> None:
    error = answer.json()["error"]
    assert (answer.status, error["type"], error["code"]) == (503, "server_error", "out_of_memory"), answer
    assert answer.headers["retry-after"] == "1"
    assert "chunks" in error["message"] and "DELETE /v1/chunks/NAME" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_without_pages_is_told_to_come_again(served: Live, stream: bool) -> None:
    hold(served, PAGES - 3)
    body = {"max_tokens": 2, "temperature": 0, "stream": stream}
    answer = served.post("/v1/completions", body | {"prompt": [300] * 49})
    require_busy(answer)
    assert answer.json()["error"]["message"].startswith("the prompt needs 4 pages of KV memory, and chunks leave it 3 of 32")
    require_busy(served.post("/v1/completions", body | {"prompt": [[5, 6], [300] * 49]}))
    require_busy(served.post("/v1/chat/completions", body | {"messages": [{"role": "user", "content": "word " * 60}]}))
    require_busy(served.post("/v1/responses", {"input": "word " * 60, "max_output_tokens": 2, "stream": stream}))
    assert not served.engine.state.waiting  # it was not queued
    assert served.post("/v1/completions", body | {"prompt": [300] * 47, "max_tokens": 1}).status == 200
    assert served.call("DELETE", "/v1/chunks/held").status == 200
    assert served.post("/v1/completions", body | {"prompt": [300] * 49}).status == 200


def test_it_is_told_whatever_runs(served: Live) -> None:
    hold(served, PAGES - 6)
    other = threading.Thread(target=served.post, args=("/v1/completions", {"prompt": "x", "max_tokens": 90, "ignore_eos": True}))
    other.start()
    require_busy(served.post("/v1/completions", {"prompt": [300] * 97}))
    assert served.post("/v1/completions", {"prompt": [300] * 90, "max_tokens": 2}).status == 200  # it waits for the other's pages
    other.join(LIMIT)


def test_scores_and_compositions_without_pages_are_told_too(served: Live) -> None:
    hold(served, 20)
    hold(served, 9, "other", 8)
    require_busy(served.post("/v1/completions", {"prompt": [300] * 80, "echo": True, "logprobs": 1, "max_tokens": 0}))
    require_busy(served.post("/v1/completions", {"prompt": "x", "chunks": ["held", "other"], "max_tokens": 2}))


def test_what_can_never_fit_stays_400(served: Live) -> None:
    hold(served, PAGES - 3)
    assert served.get("/v1/models").json()["data"][0]["max_model_len"] == PAGES * SIZE
    for path, body, param in (
        ("/v1/completions", {"prompt": [300] * PAGES * SIZE}, "prompt"),
        ("/v1/completions", {"prompt": [300], "max_tokens": PAGES * SIZE}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 600}]}, "messages"),
        ("/v1/chunks", {"name": "long", "token_ids": [300] * PAGES * SIZE}, "token_ids"),
    ):
        error = served.post(path, body).json()["error"]
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")


def test_a_prompt_that_shares_the_pages_of_a_chunk_needs_few(served: Live) -> None:
    ids = hold(served, PAGES - 3)
    for body in ({"prompt": [*ids, 5, 6]}, {"prompt": [5, 6], "chunks": ["held"]}):
        answer = served.post("/v1/completions", body | {"max_tokens": 2, "temperature": 0, "ignore_eos": True}).json()
        assert answer["usage"]["completion_tokens"] == 2 and "cut_short" not in answer.get("nanovllm", {})


def test_compositions_give_way_to_prompts_and_replies(served: Live) -> None:
    hold(served, 8)
    hold(served, 8, "other", 8)
    body = {"prompt": "x", "chunks": ["held", "other"], "max_tokens": 2}
    assert served.post("/v1/completions", body).status == 200 and len(served.engine.named.composed) == 1
    assert served.post("/v1/completions", {"prompt": [400] * SIZE * 14, "max_tokens": 2}).status == 200  # of the 16 that are left
    assert not served.engine.named.composed
    assert served.post("/v1/completions", body).status == 200 and len(served.engine.named.composed) == 1
    answer = served.post("/v1/completions", {"prompt": [400], "max_tokens": 15 * SIZE, "ignore_eos": True}).json()
    assert answer["usage"]["completion_tokens"] == 15 * SIZE and not served.engine.named.composed


def test_compositions_give_way_to_one_another(served: Live) -> None:
    hold(served, 8)
    hold(served, 7, "other", 8)
    for names in (["held", "other"], ["other", "held"]):  # each takes the pages of its second chunk again, of 17
        answer = served.post("/v1/completions", {"prompt": "x", "chunks": names * 2, "max_tokens": 2})
        assert answer.status == 503  # 30 pages, of which one chunk has 8
        answer = served.post("/v1/completions", {"prompt": "x", "chunks": names, "max_tokens": 2})
        assert answer.status == 200 and answer.json()["nanovllm"]["chunks"] == names
    served.wait_until_idle()
    nv.check(served.engine.state)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_chunks_cut_short_says_so(served: Live, path: str, stream: bool) -> None:
    hold(served, PAGES - 2)
    body: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "stream": stream}
    own = {
        "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 100},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 100},
        "/v1/responses": {"input": "Hello", "max_output_tokens": 100},
    }[path]
    if stream and path == "/v1/responses":
        data = served.post(path, body | own).body.decode()
        answer = json.loads(data.rstrip().rpartition("data: ")[2])["response"]
    elif stream:
        answer = served.events(path, body | own)[-1]
    else:
        answer = served.post(path, body | own).json()
    told = answer["nanovllm"]["cut_short"]
    assert told["choices"] == [0] and "DELETE /v1/chunks/NAME" in told["message"]
    if path == "/v1/responses":
        assert answer["status"] == "incomplete" and answer["incomplete_details"] == {"reason": "max_output_tokens"}
    else:
        assert answer["choices"][0]["finish_reason"] == "length"


def test_only_the_choices_that_were_cut_are_named(served: Live) -> None:
    hold(served, PAGES - 3)
    body = {"prompt": ["a", "b"], "max_tokens": 45, "temperature": 0, "ignore_eos": True}
    answer = served.post("/v1/completions", body).json()
    assert "nanovllm" not in answer and answer["usage"]["completion_tokens"] == 90  # one after the other
    body = {"prompt": ["a", "b " * 20], "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    answer = served.post("/v1/completions", body).json()
    assert answer["nanovllm"]["cut_short"]["choices"] == [1] and answer["usage"]["completion_tokens"] < 80


def test_other_errors_and_devices_without_memory_keep_their_words(served: Live) -> None:
    state = served.engine.state
    device = nv.OutOfPagesError("the device has no memory")
    device.__cause__ = MemoryError()
    for error in (nv.InvalidRequestError("x"), device):
        assert explained(state, error) is error
    told = explained(state, nv.OutOfPagesError("release chunks"))
    assert type(told) is nv.OutOfPagesError and "try again later" in str(told) and "chunks" not in str(told)
    assert explained(state, told) is not None


@pytest.mark.unhooked
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_what_is_refused_is_what_the_engine_could_not_run(data: st.DataObject) -> None:
    """Chunks over a tiny pool, and one prompt that begins with one of them, with its tokens, or with neither."""
    num_pages, size = data.draw(st.integers(3, 12), "pages"), data.draw(st.sampled_from([2, 4]), "page size")
    state = nv.init_state(MODEL, num_pages=num_pages, page_size=size, max_model_len=num_pages * size)
    chunks = list[nv.Chunk]()
    for first in range(data.draw(st.integers(0, 3), "chunks")):
        after = data.draw(st.sampled_from([None, *chunks]), "after")
        try:
            state, chunk = nv.prefill(MODEL, state, [first] * data.draw(st.integers(1, 3 * size), "length"), after)
        except (nv.OutOfPagesError, nv.InvalidRequestError):
            continue
        chunks.append(chunk)
    begin = data.draw(st.sampled_from([None, *chunks, *(chunk.token_ids for chunk in chunks)]), "beginning")
    rest = np.full(data.draw(st.integers(1, num_pages * size), "rest"), 40, np.int32)
    whole = data.draw(st.booleans(), "keep")
    context = [rest] if begin is None else [begin, rest]
    if sum(map(len, context)) >= num_pages * size:
        return
    refused = False
    try:
        state, _ = require_pages(state, NamedChunks(), [context, context], whole=whole, namespace=0)
    except nv.OutOfPagesError:
        refused = True
    state, (rid,) = submit_many(MODEL, state, [context], [nv.SamplingParams(temperature=0, max_tokens=1)], keep=whole)
    outputs = dict[int, nv.RequestOutput]()
    while state.running or state.waiting:
        state, found = nv.step(MODEL, state)
        outputs |= {out.request_id: out.output for out in found if out.output is not None}
    assert refused == isinstance(outputs[rid].error, nv.OutOfPagesError), outputs[rid]
    nv.check(state)


def test_with_host_memory_chunks_give_way_and_come_back() -> None:
    with Live(settings=Settings(shutdown_seconds=1.0, chunk_share=1.0), num_pages=PAGES, page_size=SIZE, host_kv_gib=0.1) as live:
        ids, body = hold(live, PAGES - 3), {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
        expected = live.post("/v1/completions", body | {"prompt": [5, 6], "chunks": ["held"]}).json()["choices"][0]["text"]
        assert live.post("/v1/completions", body | {"prompt": [300] * 200}).status == 200
        host = live.engine.state.pool.host
        assert host is not None and len(host.moved) == 1
        answer = live.post("/v1/completions", body | {"prompt": [5, 6], "chunks": ["held"]}).json()
        assert answer["choices"][0]["text"] == expected and answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(ids)
        assert not live.engine.state.pool.host.moved
        assert live.call("DELETE", "/v1/chunks/held").status == 200
        live.wait_until_idle()
        nv.check(live.engine.state)
