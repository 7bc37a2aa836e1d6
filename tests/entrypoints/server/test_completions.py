"""`/v1/completions`: the texts of the library, whole and streamed, and errors as OpenAI's clients know them."""

import json
import socket
import threading
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

import nanovllm as nv
from nanovllm.entrypoints.server import engine_loop
from nanovllm.entrypoints.server.settings import Settings
from nanovllm.entrypoints.server.wire import LENGTH, Accepted, Failure, Outward, Submit, frame, take_frames
from nanovllm.testing.models import byte_tokenizer, random_model, tiny_config
from nanovllm.tokenizer.tokenizer import make_tokenizer
from tests.entrypoints.server.live import LIMIT, Live

pytestmark = pytest.mark.unhooked  # uvloop's transports are of types of its own

PATH = "/v1/completions"
PROMPT = "Once upon a time"
GREEDY: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module")
def llm(live: Live) -> nv.LLM:
    return nv.LLM(live.model, num_pages=128)


def test_a_reply_is_that_of_the_library(live: Live, llm: nv.LLM):
    (output,) = llm.generate(PROMPT, nv.SamplingParams(temperature=0, max_tokens=24))
    answer = live.post(PATH, GREEDY)
    assert answer.status == 200 and answer.headers["content-type"] == "application/json"
    value = answer.json()
    assert value["object"] == "text_completion" and value["model"] == "tiny" and value["id"].startswith("cmpl-")
    assert value["choices"] == [{"index": 0, "text": output.text, "logprobs": None, "finish_reason": "length"}]
    assert value["usage"]["prompt_tokens"] == 4 and value["usage"]["completion_tokens"] == 24 and value["usage"]["total_tokens"] == 28


def test_a_stream_adds_up_to_the_reply(live: Live):
    whole = live.post(PATH, GREEDY).json()["choices"][0]
    events = live.events(PATH, GREEDY | {"stream": True})
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1 and len(events) > 10
    assert "".join(event["choices"][0]["text"] for event in events) == whole["text"]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["length"]
    assert all("usage" not in event for event in events)


def test_an_event_can_have_several_tokens(live: Live):
    """The first token comes at once, then N or more at a time, and the rest with the end."""
    body = GREEDY | {"stream": True, "return_token_ids": True, "n": 2}
    whole = live.post(PATH, GREEDY | {"return_token_ids": True}).json()["choices"][0]
    events = [event["choices"][0] for event in live.events(PATH, body | {"stream_interval": 8})]
    for index in range(2):
        own = [event for event in events if event["index"] == index and "prompt_token_ids" not in event]
        counts = [len(event["token_ids"]) for event in own]
        assert [token for event in own for token in event["token_ids"]] == whole["token_ids"]
        assert "".join(event["text"] for event in own) == whole["text"]
        assert all(count >= 8 for count in counts[1:-1]) and counts[0] < 8 and 2 <= len(counts) <= 4
    for wrong in (0, -1, 1025, 1.5):
        answer = live.post(PATH, body | {"stream_interval": wrong})
        assert answer.status == 400 and answer.json()["error"]["param"] == "stream_interval"


def test_the_operator_chooses_how_many_tokens_an_event_has(live: Live):
    with Live(live.model, Settings(stream_interval=6, shutdown_seconds=1.0)) as server:
        chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 24, "temperature": 0, "ignore_eos": True, "stream": True}
        for path, body in ((PATH, GREEDY | {"stream": True}), ("/v1/chat/completions", chat)):
            few, many = len(server.events(path, body)), len(server.events(path, body | {"stream_interval": 1}))
            assert few < 10 < many
        items = server.post("/v1/responses", {"input": "Hello", "max_output_tokens": 24, "temperature": 0, "stream": True}).body
        assert items.count(b"event: response.output_text.delta") + items.count(b"event: response.reasoning_text.delta") < 10
    for wrong in (0, 1025):
        with pytest.raises(nv.InvalidRequestError, match="stream_interval"):
            Settings(stream_interval=wrong)


def test_usage_of_a_stream(live: Live):
    *events, last = live.events(PATH, GREEDY | {"stream": True, "stream_options": {"include_usage": True}})
    assert all(event["usage"] is None for event in events)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 24 and last["usage"]["prompt_tokens"] == 4
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = live.events(PATH, GREEDY | {"stream": True, "stream_options": options})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 24 == last["usage"]["completion_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_many_prompts_of_texts_and_ids_with_several_choices(live: Live, llm: nv.LLM, stream: bool):
    texts = [PROMPT, "The cat", "Hello"]
    encode = nv.load_model("tiny", device="cpu").tokenizer.encode
    wanted = [output.text for output in llm.generate(texts, nv.SamplingParams(temperature=0, max_tokens=9)) for _ in range(2)]
    for prompt in (texts, [encode(text) for text in texts]):
        body = GREEDY | {"prompt": prompt, "n": 2, "max_tokens": 9, "stream": stream}
        found = dict.fromkeys(range(6), "")
        choices = [c for e in live.events(PATH, body) for c in e["choices"]] if stream else live.post(PATH, body).json()["choices"]
        for choice in choices:
            found[choice["index"]] += choice["text"]
        assert list(found.values()) == wanted
    one = live.post(PATH, GREEDY | {"prompt": encode(PROMPT)}).json()
    assert one["choices"][0]["text"] == live.post(PATH, GREEDY).json()["choices"][0]["text"]


def test_a_bias_changes_the_reply(live: Live):
    body = GREEDY | {"logit_bias": {"7": 100}, "max_tokens": 3}
    text = live.post(PATH, body).json()["choices"][0]["text"]
    assert text == nv.load_model("tiny", device="cpu").tokenizer.decode([7, 7, 7])


def test_choices_of_one_seed_differ_and_come_again(live: Live):
    body = GREEDY | {"n": 3, "temperature": 1.0, "seed": 5}
    one, two = ([choice["text"] for choice in live.post(PATH, body).json()["choices"]] for _ in range(2))
    assert one == two and len(set(one)) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text(live: Live, stream: bool):
    body = GREEDY | {"stop": [" Jonas", "zzz"], "stream": stream}
    if stream:
        events = live.events(PATH, body)
        assert "".join(e["choices"][0]["text"] for e in events) == ", a boy named"
        assert events[-1]["choices"][0]["finish_reason"] == "stop"
    else:
        choice = live.post(PATH, body).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (", a boy named", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_echo_gives_the_prompt_first(live: Live, stream: bool):
    plain = live.post(PATH, GREEDY).json()["choices"][0]["text"]
    body = GREEDY | {"echo": True, "stream": stream}
    found = live.events(PATH, body) if stream else [live.post(PATH, body).json()]
    assert "".join(event["choices"][0]["text"] for event in found) == PROMPT + plain


@pytest.mark.parametrize(
    ("fields", "status", "param", "code"),
    [
        ({"temperature": -1}, 400, "temperature", None),
        ({"temperature": "hot"}, 400, "temperature", None),
        ({"top_p": 0}, 400, "top_p", None),
        ({"n": 0}, 400, "n", None),
        ({"n": 10**6}, 400, "n", None),
        ({"n": 10**30}, 400, "n", None),
        ({"max_tokens": -3}, 400, "max_tokens", None),
        ({"max_tokens": 10**7}, 400, "prompt", "context_length_exceeded"),
        ({"prompt": "word " * 5000}, 400, "prompt", "context_length_exceeded"),
        ({"prompt": ""}, 400, "prompt", None),
        ({"prompt": []}, 400, "prompt", None),
        ({"prompt": [[]]}, 400, "prompt[0]", None),
        ({"prompt": [1, "two"]}, 400, "prompt", None),
        ({"prompt": [4096]}, 400, "prompt", None),
        ({"prompt": [-1]}, 400, "prompt", None),
        ({"prompt": [10**40]}, 400, "prompt", None),
        ({"prompt": "\ud800"}, 400, None, None),
        ({"model": "gpt-5"}, 404, "model", "model_not_found"),
        ({"suffix": "end"}, 400, "suffix", "unsupported_parameter"),
        ({"temprature": 1}, 400, "temprature", "unknown_parameter"),
        ({"stop": ["x"] * 100}, 400, "stop", None),
        ({"stop": ""}, 400, "stop", None),
        ({"prompt": ["a"] * 1025}, 400, "prompt", None),
        ({"prompt": ["a"] * 2049}, 400, "prompt", None),
        ({"best_of": 0}, 400, "best_of", None),
        ({"best_of": 129}, 400, "best_of", None),
        ({"n": 3, "best_of": 2}, 400, "best_of", None),
        ({"best_of": "all"}, 400, "best_of", None),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias", None),
        ({"logit_bias": {"4096": 1}}, 400, "logit_bias", None),
        ({"logit_bias": {"7": 1000}}, 400, "logit_bias", None),
        ({"priority": "high"}, 400, "priority", None),
        ({"stream_options": 3}, 400, "stream_options", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_value_is_refused_by_name(live: Live, fields: dict[str, Any], status: int, param: str | None, code: str | None, stream: bool):
    answer = live.post(PATH, GREEDY | {"stream": stream} | fields)
    assert answer.status == status, answer
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert error["param"] == param and error["code"] == code
    assert live.post(PATH, GREEDY | {"max_tokens": 1}).status == 200


def test_fields_of_other_servers_are_taken_or_ignored(live: Live):
    plain = live.post(PATH, GREEDY).json()["choices"]
    more = {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "suffix": None, "use_beam_search": False, "zzz": 1}
    assert live.post(PATH, GREEDY | more | {"top_k": -1, "repetition_penalty": 1.0}).json()["choices"] == plain


def test_fields_of_other_routes_are_not_ignored_in_silence(live: Live):
    tools = [{"type": "function", "function": {"name": "f"}}]
    for field, value in (("tools", tools), ("tool_choice", "required"), ("do_sample", False), ("typical_p", 0.5)):
        answer = live.post(PATH, GREEDY | {field: value}).json()["error"]
        assert (answer["param"], answer["code"]) == (field, "unsupported_parameter")
    for field in ("response_forma", "guided_jsn", "temprature"):
        answer = live.post(PATH, GREEDY | {field: 1}).json()["error"]
        assert (answer["param"], answer["code"]) == (field, "unknown_parameter") and "did you mean" in answer["message"]
    assert live.post(PATH, GREEDY | {"tools": [], "tool_choice": "auto", "do_sample": True, "typical_p": 1.0}).status == 200


def test_special_tokens_of_a_prompt_may_be_left_out() -> None:
    backend = byte_tokenizer().backend
    backend.add_special_tokens(["<s>"])
    begin = backend.token_to_id("<s>")
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    tokenizer = make_tokenizer(backend, {"bos_token": "<s>"}, None)
    model = random_model(tiny_config(vocab_size=288), tokenizer=tokenizer)
    assert tokenizer.encode("Hi")[0] == begin
    with Live(model) as server:
        for special in (None, True, False):
            answer = server.post(PATH, {"prompt": ["Hi", "Ho"], "max_tokens": 1, "add_special_tokens": special, "return_token_ids": True})
            found = [choice["prompt_token_ids"] for choice in answer.json()["choices"]]
            assert found == [tokenizer.encode(text, special is not False) for text in ("Hi", "Ho")]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"3", b"null", b'{"prompt": NaN}', b"[" * 100_000, b'{"a":' * 70 + b"1" + b"}" * 70, b"\xff\xfe", b"{}" * 3]
)
def test_a_body_that_is_no_json_object_is_refused(live: Live, body: bytes):
    answer = live.post(PATH, body)
    assert answer.status == 400 and answer.json()["error"]["message"]
    assert bool(body) == ("the body is empty" not in answer.json()["error"]["message"])


def test_a_page_of_another_site_cannot_post_a_form(live: Live):
    assert live.call("POST", PATH, json.dumps(GREEDY).encode(), {"content-type": "text/plain"}).status == 415


@pytest.mark.parametrize("stops", [["Jonas"], [" lived in", "ed"], "ived", ["named J", "Jonas lived"], ["nowhere"]])
@pytest.mark.parametrize("count", [1, 3])
def test_the_stop_string_may_stay(live: Live, stops: Any, count: int):
    """The text is that without a stop string up to the end of the one that comes first, whole and streamed."""
    asked = GREEDY | {"max_tokens": 12, "prompt": [GREEDY["prompt"]] * count}
    text = live.post(PATH, asked).json()["choices"][0]["text"]
    ends = [(place, place + len(stop)) for stop in ([stops] if isinstance(stops, str) else stops) if (place := text.find(stop)) >= 0]
    wanted = text[: min(ends)[1]] if ends else text
    asked |= {"stop": stops, "include_stop_str_in_output": True}
    whole = live.post(PATH, asked).json()["choices"]
    assert [choice["text"] for choice in whole] == [wanted] * count
    assert {choice["finish_reason"] for choice in whole} == {"stop" if ends else "length"}
    streamed = ["" for _ in range(count)]
    for event in live.events(PATH, asked | {"stream": True}):
        streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert streamed == [wanted] * count
    chat = {"messages": [{"role": "user", "content": "What is 27 + 38?"}], "temperature": 0, "stop": [" 65"], "max_tokens": 64}
    replies = [
        live.post("/v1/chat/completions", chat | {"include_stop_str_in_output": keep, "reasoning_effort": "none"}).json()["choices"][0]
        for keep in (False, True)
    ]
    assert replies[1]["message"]["content"] == replies[0]["message"]["content"] + " 65"
    response = {"input": "What is 27 + 38?", "reasoning": {"effort": "none"}, "temperature": 0, "stop": [" 65"]}
    answer = live.post("/v1/responses", response | {"include_stop_str_in_output": True}).json()
    assert answer["output"][0]["content"][0]["text"] == replies[1]["message"]["content"]


def test_the_last_tokens_of_a_prompt_are_kept(live: Live):
    """As if they had been sent alone; the texts may be longer than the context."""
    assert live.model.tokenizer is not None
    asked, short, long = GREEDY | {"max_tokens": 2}, "Once upon a time there was a fox.", "word " * 5000 + "Once upon a time"
    for text, kept, left in ((short, 1, 1), (short, 5, 5), (short, 2000, 2000), (short, -1, 2046), (long, 5, 5), (long, -1, 2046)):
        ids = live.model.tokenizer.encode(text)
        cut = [live.post(PATH, asked | {"prompt": one, "truncate_prompt_tokens": kept}).json() for one in (text, ids, [text], [ids])]
        alone = live.post(PATH, asked | {"prompt": ids[-left:]}).json()
        assert all(one["choices"] == alone["choices"] for one in cut)
        assert {one["usage"]["prompt_tokens"] for one in cut} == {min(left, len(ids))}
    chat = {"messages": [{"role": "user", "content": long}], "max_tokens": 8, "truncate_prompt_tokens": 30}
    assert live.post("/v1/chat/completions", chat).json()["usage"]["prompt_tokens"] == 30
    for kept in (0, -2, 2049):
        answer = live.post(PATH, GREEDY | {"truncate_prompt_tokens": kept})
        assert answer.status == 400 and answer.json()["error"]["param"] == "truncate_prompt_tokens"
    assert live.post(PATH, GREEDY | {"prompt": "word " * 200_000, "truncate_prompt_tokens": 8}).status == 400
    answer = live.post(PATH, GREEDY | {"chunks": ["a"], "truncate_prompt_tokens": 8})
    assert answer.status == 400 and answer.json()["error"]["param"] == "truncate_prompt_tokens"


def test_a_client_that_goes_away_leaves_no_request(live: Live):
    body = json.dumps(GREEDY | {"max_tokens": 1500, "ignore_eos": True, "stream": True}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    for stream in (True, False):
        data = body if stream else body.replace(b'"stream": true', b'"stream": null')
        so_far = live.engine.metrics.generation_tokens
        with socket.create_connection(("127.0.0.1", live.port), timeout=LIMIT) as sock:
            sock.sendall(head + data)
            if stream:
                assert b"200 OK" in sock.recv(64)
            live.wait_until_running()
        live.wait_until_idle()
        assert live.engine.metrics.generation_tokens - so_far < 1500, "the engine runs a request to its end whose client has gone"
    assert not live.server.streams and not live.server.engine.num_open


def test_a_client_that_reads_nothing_gets_its_text_in_larger_pieces_later(live: Live):
    """The long name of the model fills the sockets' buffers, so that the server must hold text back. It holds tokens, and no events."""
    name = "long" * 1000
    asked = GREEDY | {"model": name, "prompt": ["x"] * 6, "max_tokens": 150, "ignore_eos": True}
    body = json.dumps(asked | {"stream": True}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with Live(live.model, Settings(model_name=name)) as server:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(LIMIT)
            sock.connect(("127.0.0.1", server.port))
            sock.sendall(head.encode() + body)
            server.wait_until_generated(6 * 150)
            server.wait_until_idle()  # the engine does not wait for the reader
            data = b""
            while part := sock.recv(1 << 16):
                data += part
        whole = server.post(PATH, asked).json()["choices"]
    texts = dict.fromkeys(range(6), "")
    count = 0
    for line in data.split(b"\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                texts[choice["index"]] += choice["text"]
                count += 1
    assert b"[DONE]" in data and count < 6 * 150
    assert list(texts.values()) == [choice["text"] for choice in whole]


def test_more_replies_than_the_queue_holds_are_not_to_be_asked_for_again(live: Live):
    with Live(live.model, Settings(max_waiting=4, shutdown_seconds=1.0)) as small:
        for fields, param in (
            ({"n": 5}, "n"),
            ({"best_of": 5}, "best_of"),
            ({"prompt": ["a"] * 5}, "prompt"),
            ({"prompt": ["a", "b"], "n": 3}, "prompt"),
        ):
            answer = small.post(PATH, GREEDY | {"max_tokens": 1} | fields)
            assert (
                answer.status == 400 and answer.json()["error"]["param"] == param and "--max-waiting" in answer.json()["error"]["message"]
            )
        chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        assert small.post("/v1/chat/completions", chat | {"n": 5}).json()["error"]["param"] == "n"
        assert small.post("/v1/chat/completions", chat | {"n": 4}).status == 200 == small.post(PATH, GREEDY | {"n": 4}).status


def test_requests_for_which_there_are_places_do_not_wait(live: Live):
    """Seven requests come in one frame after the other, before the first step: three of them get the places."""
    with Live(live.model, max_num_seqs=3, limits={"max_waiting": 4}) as server, socket.socket(socket.AF_UNIX) as front:
        front.connect(str(server.path))
        ids = np.array([300, 301], np.int32).tobytes()
        frames = [frame(Submit([i], [[ids]], [{"max_tokens": 500, "ignore_eos": True}], False)) for i in range(9)]
        front.sendall(b"".join(frames))
        inward, decode, found = bytearray(), msgspec.msgpack.Decoder(Outward).decode, list[Any]()
        while len(found) < 10:
            inward += front.recv(1 << 16)
            found += map(decode, take_frames(inward))
        assert [one.ids for one in found if isinstance(one, Accepted)] == [[i] for i in range(7)]
        assert [(one.ids, one.kind) for one in found if isinstance(one, Failure)] == [([i], "QueueFullError") for i in (7, 8)]


def test_requests_beyond_the_queue_are_told_to_come_again(live: Live):
    with Live(live.model, max_num_seqs=1, limits={"max_waiting": 2}) as small:
        answers: list[Any] = []

        def ask() -> None:
            answers.append(small.post(PATH, GREEDY | {"max_tokens": 150, "ignore_eos": True}))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        refused = [answer for answer in answers if answer.status == 429]
        assert {answer.status for answer in answers} == {200, 429} and len(answers) == 8
        assert all(answer.headers["retry-after"] == "1" and answer.json()["error"]["code"] == "queue_full" for answer in refused)
        small.wait_until_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies_is_told_of_and_may_be_replaced(live: Live, stream: bool):
    with Live(live.model) as server:
        body = GREEDY | {"max_tokens": 1900, "ignore_eos": True, "stream": stream}
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.append(server.post(PATH, body)))
        thread.start()
        server.wait_until_running()
        server.stop_engine()
        thread.join(LIMIT)
        if stream:
            assert b'"code":"engine_unavailable"' in answers[0].body and answers[0].body.endswith(b"data: [DONE]\n\n")
        else:
            assert answers[0].status == 503 and answers[0].json()["error"]["code"] == "engine_unavailable"
        assert server.get("/health").status == 503 and server.post(PATH, GREEDY).status == 503
        server.start_engine()
        server.wait_until_healthy()
        assert server.post(PATH, GREEDY).json()["choices"] == live.post(PATH, GREEDY).json()["choices"]


def test_a_front_end_that_speaks_nonsense_is_let_go_alone(live: Live):
    for nonsense in (LENGTH.pack(3) + b"\xc1\xc1\xc1", LENGTH.pack(1 << 30), LENGTH.pack(2) + b"\x91\x07"):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(LIMIT)
            sock.connect(str(live.path))
            assert sock.recv(1 << 16)  # the engine says hello
            sock.sendall(nonsense)
            assert sock.recv(1) == b""
    assert live.post(PATH, GREEDY | {"max_tokens": 1}).status == 200


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_whose_state_is_lost_ends_whatever_the_error(live: Live, monkeypatch: pytest.MonkeyPatch):
    """An `InvalidRequestError` is a `ValueError`, as those of frames are. It must not pass for the front end's fault."""

    def lost(model: nv.Model, state: nv.EngineState, *_: Any, **__: Any) -> Any:
        nv.submit(model, state, [1])
        raise nv.InvalidRequestError("planted")

    with Live(live.model) as server:
        monkeypatch.setattr(engine_loop, "submit_many", lost)
        assert server.post(PATH, GREEDY).status == 503
        server.engine_thread.join(LIMIT)
        assert not server.engine_thread.is_alive()
