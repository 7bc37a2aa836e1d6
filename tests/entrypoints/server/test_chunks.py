"""`/v1/chunks`: chunks over HTTP are those of the library, belong to a key, are bounded, and leave nothing behind."""

import hashlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import nanovllm as nv
from nanovllm.entrypoints.server.settings import Settings
from tests.entrypoints.server.live import LIMIT, Answer, Live

pytestmark = pytest.mark.unhooked  # whole engines run many steps, which the hook makes three to six times as long
KING = "The king of Aistonia is Oswin."
CITY = "\n\nThe capital of Aistonia is Velmora."
GREEDY: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "stop": "."}
SAMPLING = nv.SamplingParams(temperature=0, max_tokens=8, stop=".")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("chunks")
    settings = Settings(shutdown_seconds=1.0, chunk_dir=folder, max_chunks=12)
    with Live(settings=settings, num_pages=256, max_num_seqs=8, page_size=16, max_num_batched_tokens=128) as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "served" in request.fixturenames:
        served = request.getfixturevalue("served")
        for chunk in served.get("/v1/chunks").json()["data"]:
            assert served.call("DELETE", f"/v1/chunks/{chunk['name']}").status == 200
        served.wait_until_idle()
        assert len(served.engine.state.chunks) == 0 and not served.engine.named.composed and not served.engine.state.kept
        assert served.engine.state.pool.num_available == 256


class Library:
    """The library's engine, for what the server should answer."""

    def __init__(self, model: nv.Model) -> None:
        self.model, self.state = model, nv.init_state(model, num_pages=256, page_size=16)

    def prefill(self, text: Any, after: nv.Chunk | None = None) -> nv.Chunk:
        self.state, chunk = nv.prefill(self.model, self.state, text, after)
        return chunk

    def reply(self, context: Any) -> str:
        self.state, reply = nv.generate(self.model, self.state, context, SAMPLING)
        return reply.text


@pytest.fixture
def library(served: Live) -> Library:
    return Library(served.model)


def made(live: Live, name: str, text: str, **more: Any) -> dict[str, Any]:
    answer = live.post("/v1/chunks", {"name": name, "text": text, **more})
    assert answer.status == 200, answer
    return answer.json()


def completed(live: Live, chunks: list[str], prompt: str, **more: Any) -> dict[str, Any]:
    answer = live.post("/v1/completions", {"prompt": prompt, "chunks": chunks, **GREEDY, **more})
    assert answer.status == 200, answer
    return answer.json()


def code_of(answer: Answer) -> tuple[int, str | None]:
    return answer.status, answer.json()["error"]["code"]


def test_a_chunk_is_made_listed_and_deleted(served: Live) -> None:
    king = made(served, "king", KING)
    assert king["tokens"] == 11 and king["exact"] and king["operations"] == [] and king["pages"] == 1
    assert king["usage"]["prompt_tokens"] == 11 and king["usage"]["completion_tokens"] == 0
    assert served.get("/v1/chunks/king").json() == {key: value for key, value in king.items() if key != "usage"}
    assert [chunk["name"] for chunk in served.get("/v1/chunks").json()["data"]] == ["king"]
    assert served.get("/chunks").json()["limits"] == {"chunks": 12, "files": 12, "pages": 128, "page_size": 16}
    assert served.call("DELETE", "/v1/chunks/king").json()["deleted"] is True
    assert code_of(served.get("/v1/chunks/king")) == (404, "chunk_not_found")
    assert code_of(served.call("DELETE", "/v1/chunks/king")) == (404, "chunk_not_found")
    assert code_of(served.post("/v1/completions", {"prompt": "x", "chunks": ["king"]})) == (404, "chunk_not_found")


def test_a_completion_after_a_chunk_is_the_librarys(served: Live, library: Library) -> None:
    made(served, "king", KING)
    both = made(served, "both", CITY, after="king")
    assert both["tokens"] == 23 and both["exact"] and both["usage"]["prompt_tokens_details"]["cached_tokens"] == 11
    question = "\n\nThe capital of Aistonia is"
    answer = completed(served, ["both"], question)
    chunk = library.prefill(CITY, library.prefill(KING))
    assert answer["choices"][0]["text"] == library.reply([chunk, question]) == " Velmora"
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 23
    assert answer["usage"]["prompt_tokens"] == 23 + len(library.model.tokenizer.encode(question, add_special_tokens=False))
    assert answer["nanovllm"] == {"chunks": ["both"], "exact": True}
    events = served.events("/v1/completions", {"prompt": question, "chunks": ["both"], **GREEDY, "stream": True})
    assert "".join(event["choices"][0]["text"] for event in events) == " Velmora"
    assert events[-1]["nanovllm"] == answer["nanovllm"] and all("nanovllm" not in event for event in events[:-1])
    assert completed(served, ["both"], "", stop=None, max_tokens=2)["usage"]["prompt_tokens"] == 23


def test_several_chunks_are_composed_once(served: Live, library: Library) -> None:
    made(served, "king", KING)
    made(served, "city", CITY)
    king, city = library.prefill(KING), library.prefill(CITY[0:])
    assert served.get("/v1/chunks/city").json()["tokens"] == len(city)
    for names, chunks in ((["king", "city"], [king, city]), (["city", "king"], [city, king])):
        library.state, both = nv.compose(library.model, library.state, chunks)
        for _ in range(2):
            answer = completed(served, names, "\n\nThe capital of Aistonia is", n=2)
            assert {choice["text"] for choice in answer["choices"]} == {library.reply([both, "\n\nThe capital of Aistonia is"])}
            assert answer["nanovllm"] == {"chunks": names, "exact": False}
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(both)
    assert len(served.engine.named.composed) == 2
    made(served, "king", KING + KING, replace=True)
    assert len(served.engine.named.composed) == 0
    assert completed(served, ["king", "city"], "x")["usage"]["prompt_tokens"] > len(king) * 2 + len(city)
    for count in range(20):  # the number of compositions is bounded
        completed(served, ["king"] * (count % 18 + 2), "x", max_tokens=1)
    assert len(served.engine.named.composed) <= 16


def test_compose_drop_fork_and_truncate_are_the_librarys(served: Live, library: Library) -> None:
    made(served, "king", KING)
    made(served, "city", CITY)
    king, city = library.prefill(KING), library.prefill(CITY)
    question = " The capital of Aistonia is"
    for recompute in (0, 2, 0.5, "all"):
        answer = served.post("/v1/chunks/compose", {"name": "both", "names": ["king", "city"], "recompute": recompute, "replace": True})
        library.state, both = nv.compose(library.model, library.state, [king, city], recompute)
        assert answer.status == 200 and answer.json()["tokens"] == len(both) and answer.json()["exact"] == both.provenance.exact, answer
        assert answer.json()["operations"] == list(both.provenance.operations)
        assert completed(served, ["both"], question)["choices"][0]["text"] == library.reply([both, question])
    for mode in ("recompute", "shift", "gap"):
        body = {"spans": [[2, 4], [8, 11]], "mode": mode, "to": f"less-{mode}"}
        answer = served.post("/v1/chunks/both/drop", body)
        library.state, less = nv.drop(library.model, library.state, both, 8, 11, mode)
        library.state, less = nv.drop(library.model, library.state, less, 2, 4, mode)
        assert answer.status == 200 and answer.json()["tokens"] == len(less) == 18 and answer.json()["exact"] == less.provenance.exact
        assert completed(served, [f"less-{mode}"], question)["choices"][0]["text"] == library.reply([less, question])
    assert served.post("/v1/chunks/both/drop", {"spans": [[0, 2], [2, 4], [1, 3]], "mode": "shift"}).json()["tokens"] == 19
    assert served.post("/v1/chunks/king/fork", {"to": "twin"}).json()["tokens"] == 11
    assert served.call("DELETE", "/v1/chunks/king").status == 200
    assert served.post("/v1/chunks/twin/truncate", {"tokens": 7, "to": "short"}).json()["tokens"] == 7
    assert served.post("/v1/chunks/twin/truncate", {"tokens": 5}).json()["tokens"] == 5 == served.get("/v1/chunks/twin").json()["tokens"]
    library.state, short = nv.truncate(library.state, king, 7)
    assert completed(served, ["short"], "")["choices"][0]["text"] == library.reply(short)


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_is_kept_as_a_chunk(served: Live, library: Library, stream: bool) -> None:
    made(served, "king", KING)
    body = {"prompt": " The king of Aistonia is", "chunks": ["king"], "keep": "turn", **GREEDY}
    answer = served.events("/v1/completions", body | {"stream": True})[-1] if stream else served.post("/v1/completions", body).json()
    king = library.prefill(KING)
    library.state, reply = nv.generate(library.model, library.state, [king, " The king of Aistonia is"], SAMPLING)
    assert answer["nanovllm"]["kept"]["tokens"] == len(reply.chunk) and answer["nanovllm"]["kept"]["exact"]
    next_prompt = " The king of Aistonia is"
    again = completed(served, ["turn"], next_prompt)
    assert again["choices"][0]["text"] == library.reply([reply.chunk, next_prompt])
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(reply.chunk)
    assert code_of(served.post("/v1/completions", body)) == (409, "chunk_exists")
    assert served.post("/v1/completions", body | {"keep_replace": True}).status == 200
    assert served.post("/v1/completions", body | {"keep": "two", "n": 2}).json()["error"]["param"] == "keep"


def test_a_kept_reply_loses_its_thinking(served: Live) -> None:
    tokenizer = served.model.tokenizer
    assert tokenizer.think_token_ids is not None
    opening, closing = tokenizer.think_token_ids
    prompt = tokenizer.encode("Once upon a time")
    body = {"prompt": [*prompt, opening], "max_tokens": 6, "temperature": 0, "logit_bias": {str(closing): 100}, "ignore_eos": True}
    assert served.post("/v1/completions", body | {"keep": "with", "keep_thinking": True}).status == 200
    assert served.post("/v1/completions", body | {"keep": "without"}).status == 200
    space = served.engine.named.space("")
    whole, less = (space[name].chunk.token_ids.tolist() for name in ("with", "without"))
    assert whole[: len(prompt) + 2] == [*prompt, opening, closing] and len(whole) == len(prompt) + 7
    assert less[: len(prompt)] == prompt and opening not in less and len(less) < len(whole) and space["without"].chunk.provenance.exact


@pytest.mark.parametrize("name", ["../x", ".", "", "a" * 65, "ä", "a/b", "a\0", "a b", "\ud83d", 7, None, ["a"]])
def test_names_of_attack_are_refused(served: Live, name: Any) -> None:
    for path, body in (
        ("/v1/chunks", {"name": name, "text": KING}),
        ("/v1/chunks", {"name": "a", "text": KING, "after": name}),
        ("/v1/chunks/compose", {"name": "a", "names": [name]}),
        ("/v1/completions", {"prompt": "x", "chunks": [name]}),
        ("/v1/completions", {"prompt": "x", "keep": name}),
    ):
        if name is None and ("keep" in body or "after" in body):
            continue
        assert served.post(path, body).status == 400, (path, body)
    for path in ("/v1/chunks/../x", "/v1/chunks/%2e%2e%2fx", "/v1/chunks/%2e%2e", "/v1/chunks/a%00b", "/v1/chunks/" + "a" * 65):
        assert served.get(path).status in (400, 404) and served.post(path + "/save", {}).status in (400, 404)
    assert served.settings.chunk_dir is not None and [*served.settings.chunk_dir.iterdir()] == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chunks", {"name": "a"}, "text"),
        ("/v1/chunks", {"name": "a", "text": "x", "token_ids": [1]}, "token_ids"),
        ("/v1/chunks", {"name": "a", "text": ""}, "text"),
        ("/v1/chunks", {"name": "a", "text": 3}, "text"),
        ("/v1/chunks", {"name": "a", "token_ids": [4096]}, "token_ids"),
        ("/v1/chunks", {"name": "a", "text": "x", "aftr": "b"}, "aftr"),
        ("/v1/chunks", {"name": "a", "messages": []}, "messages"),
        ("/v1/chunks", {"name": "a", "messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ("/v1/chunks", {"name": "a", "text": "word " * 5000}, "text"),
        ("/v1/chunks/compose", {"name": "a", "names": []}, "names"),
        ("/v1/chunks/compose", {"name": "a", "names": ["king"] * 65}, "names"),
        ("/v1/chunks/compose", {"name": "a", "names": ["king", "king"], "recompute": -1}, "recompute"),
        ("/v1/chunks/compose", {"name": "a", "names": ["king", "king"], "recompute": "some"}, "recompute"),
        ("/v1/chunks/king/truncate", {"tokens": 0}, "tokens"),
        ("/v1/chunks/king/truncate", {"tokens": -3}, "tokens"),
        ("/v1/chunks/king/truncate", {"tokens": 10**30}, "tokens"),
        ("/v1/chunks/king/drop", {"spans": []}, "spans"),
        ("/v1/chunks/king/drop", {"spans": [[-1, 3]]}, "spans[0]"),
        ("/v1/chunks/king/drop", {"spans": [[3, 3]]}, "spans[0]"),
        ("/v1/chunks/king/drop", {"spans": [[0, 99]]}, "spans[0]"),
        ("/v1/chunks/king/drop", {"spans": [[0, 11]]}, "spans"),
        ("/v1/chunks/king/drop", {"spans": [[0, 3]], "mode": "hide"}, "mode"),
        ("/v1/completions", {"prompt": "x", "chunks": ["king"] * 65}, "chunks"),
    ],
)
def test_bad_values_are_refused_by_name(served: Live, path: str, body: dict[str, Any], param: str) -> None:
    made(served, "king", KING)
    answer = served.post(path, body)
    assert answer.status == 400 and answer.json()["error"]["param"] == param, answer
    assert [chunk["name"] for chunk in served.get("/v1/chunks").json()["data"]] == ["king"]


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        (
            "/v1/chunks/king/drop",
            {"spans": [[4, 90]]},
            "spans[0] is [4, 90]: it must begin before it ends, inside of the chunk's 11 tokens",
        ),
        ("/v1/chunks", {"name": "a b", "text": "x"}, "name is 'a b': names of chunks have 1 to 64 of the characters A-Z a-z 0-9 _ -"),
        ("/v1/chunks", {"text": "x"}, "name is missing"),
        ("/v1/chunks", {"name": 3, "text": "x"}, "Expected `str`, got `int`: at `name`, which is 3"),
        ("/v1/completions", {"prompt": "x", "temperature": "hot"}, "Expected `float | null`, got `str`: at `temperature`, which is 'hot'"),
        ("/v1/completions", {"prompt": "x", "stop": [3]}, "Expected `str`, got `int`: at `stop[0]`"),
    ],
)
def test_what_is_refused_is_shown(served: Live, path: str, body: dict[str, Any], told: str) -> None:
    made(served, "king", KING)
    assert served.post(path, body).json()["error"]["message"] == told


def test_an_existing_name_needs_replace(served: Live) -> None:
    made(served, "king", KING)
    answer = served.post("/v1/chunks", {"name": "king", "text": CITY})
    assert code_of(answer) == (409, "chunk_exists") and answer.headers["x-should-retry"] == "false"
    assert code_of(served.post("/v1/chunks/king/fork", {"to": "king"})) == (409, "chunk_exists")
    assert served.post("/v1/chunks/king/fork", {"to": "king", "replace": True}).status == 200
    assert made(served, "king", CITY, replace=True)["tokens"] != 11


LONG_TEXT, LONG_IDS = "word " * 3000, [300] * 3000


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/v1/chunks", {"name": "a", "token_ids": LONG_IDS}, "token_ids", "context_length_exceeded"),
        ("/v1/chunks", {"name": "a", "messages": [{"role": "user", "content": LONG_TEXT}]}, "messages", "context_length_exceeded"),
        ("/v1/chunks", {"name": "a", "text": LONG_TEXT, "after": "king"}, "text", "context_length_exceeded"),
        ("/v1/chunks", {"name": "a", "text": KING, "after": "nobody"}, "after", "chunk_not_found"),
        ("/v1/chunks", {"name": "king", "text": KING}, "name", "chunk_exists"),
        ("/v1/chunks/compose", {"name": "a", "names": ["long"] * 4}, "names", "context_length_exceeded"),
        ("/v1/chunks/compose", {"name": "a", "names": ["long"] * 4, "recompute": "all"}, "names", "context_length_exceeded"),
        ("/v1/chunks/compose", {"name": "a", "names": ["king", "nobody"]}, "names", "chunk_not_found"),
        ("/v1/chunks/compose", {"name": "king", "names": ["king", "king"]}, "name", "chunk_exists"),
        ("/v1/chunks/compose", {"name": "king", "names": ["king", "king"], "recompute": "all"}, "name", "chunk_exists"),
        ("/v1/chunks/king/fork", {"to": "long"}, "to", "chunk_exists"),
        ("/v1/chunks/king/truncate", {"to": "long", "tokens": 3}, "to", "chunk_exists"),
        ("/v1/chunks/king/drop", {"to": "long", "spans": [[1, 2]]}, "to", "chunk_exists"),
        ("/v1/chunks/king/drop", {"to": "long", "spans": [[1, 2]], "mode": "gap"}, "to", "chunk_exists"),
        ("/v1/chunks/nobody/fork", {"to": "b"}, None, "chunk_not_found"),
        ("/v1/completions", {"prompt": "x", "chunks": ["nobody"]}, "chunks", "chunk_not_found"),
        ("/v1/completions", {"prompt": "x", "chunks": ["long"] * 4}, "chunks", "context_length_exceeded"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "chunks": ["nobody"]}, "chunks", "chunk_not_found"),
        ("/v1/responses", {"input": "x", "chunks": ["long"] * 4}, "chunks", "context_length_exceeded"),
    ],
)
def test_errors_name_the_field_at_fault(served: Live, path: str, body: dict[str, Any], param: str | None, code: str) -> None:
    made(served, "king", KING)
    assert served.post("/v1/chunks", {"name": "long", "token_ids": [7, *range(300, 900)]}).status == 200
    error = served.post(path, body).json()["error"]
    assert (error["param"], error["code"]) == (param, code), error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 2}),
    ],
)
def test_a_reply_is_kept_under_a_name_that_is_free_or_may_be_replaced(served: Live, path: str, body: dict[str, Any], stream: bool) -> None:
    made(served, "king", KING)
    error = served.post(path, {**body, "keep": "king", "stream": stream}).json()["error"]
    assert (error["param"], error["code"]) == ("keep", "chunk_exists")
    assert error["message"] == "there is a chunk 'king' already: delete it, or set keep_replace"
    assert served.post("/v1/chunks", {"name": "king", "text": KING}).json()["error"]["message"].endswith("set replace")


def test_a_name_that_was_taken_meanwhile_is_told_with_the_reply(served: Live) -> None:
    running = threading.Thread(
        target=lambda: answers.append(
            served.post("/v1/completions", {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "keep": "late"}).json()
        )
    )
    answers: list[Any] = []
    running.start()
    served.wait_until_running()
    made(served, "late", KING)
    running.join()
    told = answers[0]["nanovllm"]["keep_error"]
    assert told == "there is a chunk 'late' already: delete it, or set keep_replace" and answers[0]["usage"]["completion_tokens"] == 1500


def test_messages_become_a_chunk(served: Live) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    ids = served.model.tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    turn = [*messages, {"role": "assistant", "content": "Hello! How can I help you?"}]  # a conversation so far
    assert served.post("/v1/chunks", {"name": "turn", "messages": turn, "replace": None}).json()["exact"]
    answer = served.post("/v1/chunks", {"name": "chat", "messages": messages})
    assert answer.status == 200 and answer.json()["tokens"] == len(served.model.tokenizer.encode(ids, add_special_tokens=False))


def test_chunks_are_bounded_in_number(served: Live) -> None:
    for count in range(12):
        made(served, f"n{count}", KING + str(count))
    for path, body in (
        ("/v1/chunks", {"name": "n12", "text": KING}),
        ("/v1/chunks/n0/fork", {"to": "n12"}),
        ("/v1/chunks/n0/truncate", {"to": "n12", "tokens": 3}),
        ("/v1/chunks/compose", {"name": "n12", "names": ["n0", "n1"]}),
        ("/v1/completions", {"prompt": "x", "keep": "n12"}),
    ):
        assert code_of(served.post(path, body)) == (400, "chunk_limit"), path
    made(served, "n3", CITY, replace=True)
    assert served.call("DELETE", "/v1/chunks/n3").status == 200
    made(served, "n12", KING)


def test_chunks_are_bounded_in_pages(served: Live) -> None:
    made_so_far = 0
    for count in range(12):
        body = {"name": f"p{count}", "token_ids": [200 + count, *(i % 32 + 100 for i in range(12 * 16 - 1))]}
        answer = served.post("/v1/chunks", body)
        if answer.status != 200:
            assert code_of(answer) == (400, "chunk_limit")
            break
        made_so_far += 1
    assert made_so_far == 128 // 12
    assert code_of(served.post("/v1/chunks/compose", {"name": "all", "names": ["p0", "p1"]})) == (400, "chunk_limit")
    answer = completed(served, ["p0", "p1"], "x", max_tokens=2, stop=None)  # composed for this request alone
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 * 12 * 16 and not served.engine.named.composed
    assert served.post("/v1/chunks/p0/fork", {"to": "free"}).status == 200


def test_a_client_that_leaves_during_the_making_leaves_nothing(served: Live) -> None:
    running = threading.Thread(target=lambda: [served.post("/v1/completions", {"prompt": "x", "max_tokens": 60}) for _ in range(3)])
    running.start()
    for count in range(5):
        body = b'{"name":"gone","token_ids":[' + b",".join([b"%d" % (300 + count)] * 900) + b"]}"
        head = b"POST /v1/chunks HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        with socket.create_connection(("127.0.0.1", served.port), timeout=LIMIT) as sock:
            sock.sendall(head + body)
            time.sleep(0.002 * count)
    running.join()
    end = time.monotonic() + LIMIT
    while served.engine._owners or served.engine.state.kept or served.server.num_running:  # pyright: ignore[reportPrivateUsage]
        assert time.monotonic() < end
        time.sleep(0.01)
    served.wait_until_idle()
    assert len(served.engine.state.chunks) == len(served.get("/v1/chunks").json()["data"]) <= 1


def test_a_chunk_is_saved_and_loaded_after_a_restart(served: Live, library: Library) -> None:
    made(served, "king", KING)
    question = " The king of Aistonia is"
    wanted = completed(served, ["king"], question)["choices"][0]["text"]
    assert served.post("/v1/chunks/king/save", {}).json()["bytes"] > 0
    assert code_of(served.post("/v1/chunks/king/load", {})) == (409, "chunk_exists")
    served.stop_engine()
    served.start_engine()
    served.wait_until_healthy()
    assert code_of(served.get("/v1/chunks/king")) == (404, "chunk_not_found")
    loaded = served.post("/v1/chunks/king/load", {}).json()
    assert loaded["tokens"] == 11 and loaded["exact"]
    assert completed(served, ["king"], question)["choices"][0]["text"] == wanted
    assert served.engine.state.stats.reused_tokens >= 22
    assert code_of(served.post("/v1/chunks/other/load", {})) == (404, "chunk_not_found")
    folder = served.settings.chunk_dir
    assert folder is not None
    (file,) = folder.rglob("*.safetensors")
    target = file.with_name("moved")
    file.rename(target)
    file.symlink_to(target)
    assert code_of(served.post("/v1/chunks/king/load", {"replace": True})) == (500, "chunk_file")
    assert str(folder) not in served.post("/v1/chunks/king/load", {"replace": True}).body.decode()
    file.unlink()
    file.write_bytes(target.read_bytes()[:-1])
    assert code_of(served.post("/v1/chunks/king/load", {"replace": True})) == (500, "chunk_file")
    target.unlink()
    assert served.call("DELETE", "/v1/chunks/king/save").status == 200
    assert code_of(served.call("DELETE", "/v1/chunks/king/save")) == (404, "chunk_not_found")
    file.parent.rmdir()


def test_keys_have_namespaces_of_their_own() -> None:
    keys = ("one", "two")
    settings = Settings(shutdown_seconds=1.0, api_keys=tuple(hashlib.sha256(key.encode()).digest() for key in keys))
    with Live(settings=settings, num_pages=64) as live:
        one, two = ({"authorization": f"Bearer {key}"} for key in keys)
        assert live.call("POST", "/v1/chunks", {"name": "a", "text": KING}, one).status == 200
        assert live.call("GET", "/v1/chunks", headers=two).json()["data"] == []
        for method, path, body in (
            ("GET", "/v1/chunks/a", None),
            ("DELETE", "/v1/chunks/a", None),
            ("POST", "/v1/chunks/a/fork", {"to": "b"}),
            ("POST", "/v1/completions", {"prompt": "x", "chunks": ["a"]}),
            ("POST", "/v1/chunks", {"name": "b", "text": KING, "after": "a"}),
        ):
            assert live.call(method, path, body, two).status == 404
        assert live.call("POST", "/v1/chunks", {"name": "a", "text": CITY}, two).status == 200
        assert live.call("GET", "/v1/chunks/a", headers=one).json()["tokens"] == 11
        assert live.call("GET", "/v1/chunks/a").status == 401
        assert live.call("GET", "/v1/chunks", headers=one).json()["limits"]["pages"] == 16
        assert live.call("POST", "/v1/chunks/a/save", {}, one).json()["error"]["message"].endswith("without --chunk-dir")


def test_other_replies_go_on_while_a_long_chunk_is_made(served: Live) -> None:
    """The chunk's prompt runs in pieces between the steps of others: they get tokens while it is made."""
    times: list[float] = []
    counts: list[int] = []
    step = served.engine._step  # pyright: ignore[reportPrivateUsage]

    def stepped() -> None:
        began = served.engine.metrics.generation_tokens
        step()
        times.append(time.perf_counter())
        counts.append(served.engine.metrics.generation_tokens - began)

    served.engine._step = stepped  # pyright: ignore[reportPrivateUsage]
    try:
        other = threading.Thread(target=served.post, args=("/v1/completions", {"prompt": "x", "max_tokens": 1000, "ignore_eos": True}))
        other.start()
        while not counts or not any(counts):
            time.sleep(0.001)
        first = len(counts)
        assert served.post("/v1/chunks", {"name": "long", "token_ids": [7, *range(100, 1000)]}).status == 200
        last = len(counts)
        other.join()
    finally:
        served.engine._step = step  # pyright: ignore[reportPrivateUsage]
    assert all(counts[first:last]) and last - first >= 7  # 901 tokens in steps of 128


def test_settings_of_chunks_are_checked() -> None:
    wrong: list[dict[str, Any]] = [{"max_chunks": -1}, {"chunk_share": 2.0}, {"chunk_share": -0.1}, {"keep_chunks": True}]
    for options in wrong:
        with pytest.raises(nv.InvalidRequestError):
            Settings(**options)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_goes_on_after_the_chunk_of_its_last_turn(served: Live, stream: bool) -> None:
    first = [{"role": "user", "content": "Hello"}]
    body = {"messages": first, "max_tokens": 12, "temperature": 0, "keep": "turn", "stream": stream}
    told = served.events("/v1/chat/completions", body)[-1] if stream else served.post("/v1/chat/completions", body).json()
    kept = told["nanovllm"]["kept"]
    assert kept["name"] == "turn" and kept["exact"]
    body = {"messages": [{"role": "user", "content": "And then?"}], "chunks": ["turn"], "max_tokens": 4, "temperature": 0}
    plain = served.post("/v1/chat/completions", {**body, "chunks": None}).json()
    after = served.post("/v1/chat/completions", body).json()
    assert after["usage"]["prompt_tokens"] == kept["tokens"] + plain["usage"]["prompt_tokens"]
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] >= kept["tokens"]
    assert after["nanovllm"] == {"chunks": ["turn"], "exact": True} and "nanovllm" not in plain
