"""Log-probabilities of completions and chats: the library's values, whole and streamed, as OpenAI's clients and lm-eval read them."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy as np
import openai
import pytest

import nanovllm as nv
from nanovllm.entrypoints.server import scores
from nanovllm.entrypoints.server.api import logprobs
from nanovllm.entrypoints.server.api.logprobs import TokenForms
from nanovllm.entrypoints.server.row_logprobs import Listed
from nanovllm.entrypoints.server.settings import Settings
from nanovllm.state.logprobs import Score
from nanovllm.tokenizer.tokenizer import Tokenizer
from tests.entrypoints.server.live import LIMIT, Live
from tests.entrypoints.server.openai_clients import client_of
from tests.entrypoints.server.schema_check import faults

pytestmark = pytest.mark.unhooked  # uvloop's transports are of types of its own

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "Once upon a time"
CHAT_SCHEMAS = ("ChatCompletion", "ChatCompletionEvent")
COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
BODY: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 3}
TALK: dict[str, Any] = {
    "model": "tiny", "messages": [{"role": "user", "content": "What is 27 + 38?"}], "max_tokens": 160, "temperature": 0, "logprobs": True,
    "top_logprobs": 2,
}  # fmt: skip
PARTS = "a 😀€é."


@pytest.fixture(scope="module")
def llm(live: Live) -> nv.LLM:
    return nv.LLM(live.model, num_pages=128)


@pytest.fixture(scope="module")
def tokenizer(live: Live) -> Tokenizer:
    assert live.model.tokenizer is not None
    return live.model.tokenizer


def added(live: Live, body: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """By index the text, the reason and the log-probabilities of a streamed completion."""
    rows: dict[int, dict[str, Any]] = {}
    for event in live.events(TEXT, body | {"stream": True}):
        for choice in event["choices"]:
            row = rows.setdefault(choice["index"], {"text": "", "finish_reason": None, "logprobs": {name: [] for name in COLUMNS}})
            if (listed := choice["logprobs"]) is not None:
                assert all(place < len(row["text"] + choice["text"]) or choice["finish_reason"] for place in listed["text_offset"])
                for name in COLUMNS:
                    row["logprobs"][name] += listed[name]
            row["text"] += choice["text"]
            row["finish_reason"] = choice["finish_reason"] or row["finish_reason"]
    return rows


@pytest.mark.parametrize("as_ids", [False, True])
def test_the_values_are_those_of_the_library(live: Live, llm: nv.LLM, tokenizer: Tokenizer, as_ids: bool):
    texts = [PROMPT, "The cat"]
    body = BODY | {"prompt": [tokenizer.encode(text) for text in texts] if as_ids else texts, "n": 2, "temperature": 1.0, "seed": 3}
    choices = live.post(TEXT, body).json()["choices"]
    params = [replace(live.server.generation, temperature=1.0, seed=3 + i % 2, max_tokens=12, logprobs=3) for i in range(4)]
    for choice, output in zip(choices, llm.generate([texts[0]] * 2 + [texts[1]] * 2, params), strict=True):
        listed, entries = choice["logprobs"], output.logprobs
        assert entries is not None and choice["text"] == output.text
        names = [tokenizer.decode([entry.token_id]) for entry in entries]
        assert listed["tokens"] == names and "".join(names) == output.text
        assert np.array_equal(np.float32(listed["token_logprobs"]), np.float32([entry.logprob for entry in entries]))
        assert listed["text_offset"] == [len("".join(names[:i])) for i in range(len(names))]
        for top, entry, name in zip(listed["top_logprobs"], entries, names, strict=True):
            wanted = {tokenizer.decode([token]): value for token, value in entry.top}
            assert top == wanted | {name: entry.logprob}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 3, "temperature": 1.0, "seed": 5},
        {"stop": [" Jonas", "zzz"]},
        {"stop": "nas", "logprobs": 0},
        {"stop": "nas", "include_stop_str_in_output": True},
        {"stop": [" Jonas"], "include_stop_str_in_output": True, "n": 2},
        {"echo": True},
        {"echo": True, "n": 2, "prompt": [PROMPT, PARTS, "Once"], "max_tokens": 3},
        {"echo": True, "max_tokens": 0, "prompt": [PROMPT, "The"]},
        {"stop_token_ids": [258], "max_tokens": 5},
        {"logit_bias": {"7": 100}, "max_tokens": 3},
        {"ignore_eos": True, "prompt": "The end.", "max_tokens": 40},
    ],
)
def test_streamed_values_are_those_of_the_whole_reply(live: Live, more: dict[str, Any]):
    rows, whole = added(live, BODY | more), live.post(TEXT, BODY | more).json()["choices"]
    assert len(rows) == len(whole)
    for choice in whole:
        assert rows[choice["index"]] == {name: choice[name] for name in ("text", "finish_reason", "logprobs")}


@pytest.mark.parametrize(("stop", "text", "num_tokens"), [(" Jonas", ", a boy named", 4), ("nas", ", a boy named Jo", 5), ("a b", ", ", 2)])
def test_tokens_that_a_stop_string_cuts_away_are_not_listed(live: Live, stop: str, text: str, num_tokens: int):
    choice = live.post(TEXT, BODY | {"stop": stop}).json()["choices"][0]
    listed = choice["logprobs"]
    assert choice["text"] == text and {len(listed[name]) for name in COLUMNS} == {num_tokens}
    assert "".join(listed["tokens"]).startswith(text)


def test_tokens_of_a_stop_string_that_stays_are_listed(live: Live):
    listed = live.post(TEXT, BODY | {"stop": "nas", "include_stop_str_in_output": True}).json()["choices"][0]
    assert listed["text"] == ", a boy named Jonas" and "".join(listed["logprobs"]["tokens"]).startswith(listed["text"])


def test_the_token_that_ends_a_reply_is_listed(live: Live, tokenizer: Tokenizer):
    value = live.post(TEXT, BODY | {"stop_token_ids": [258]}).json()  # " a", which the text leaves out
    assert value["choices"][0]["text"] == "," and value["choices"][0]["logprobs"]["tokens"] == [",", " a"]
    answer = live.post(CHAT, TALK).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert answer["choices"][0]["finish_reason"] == "stop" and len(content) == answer["usage"]["completion_tokens"]
    end = tokenizer.encode(content[-1]["token"], add_special_tokens=False)
    assert end[0] in live.model.config.eos_token_ids


def test_a_chat_lists_all_tokens_of_the_reply(live: Live, llm: nv.LLM, tokenizer: Tokenizer):
    answer = live.post(CHAT, TALK | {"return_token_ids": True}).json()
    choice, prompt = answer["choices"][0], answer["prompt_token_ids"]
    (output,) = llm.generate([prompt], nv.SamplingParams(temperature=0, max_tokens=160, logprobs=2))
    assert output.logprobs is not None and output.token_ids == choice["token_ids"] and choice["logprobs"]["refusal"] is None
    for shown, entry in zip(choice["logprobs"]["content"], output.logprobs, strict=True):
        name = tokenizer.decode([entry.token_id], skip_special_tokens=False)
        assert (shown["token"], bytes(shown["bytes"]).decode(), shown["logprob"]) == (name, name, entry.logprob)
        tops = [(tokenizer.decode([token], skip_special_tokens=False), value) for token, value in entry.top]
        assert [(one["token"], one["logprob"]) for one in shown["top_logprobs"]] == tops
        assert all(bytes(one["bytes"]).decode() == one["token"] for one in shown["top_logprobs"])
    spelled = b"".join(bytes(one["bytes"]) for one in choice["logprobs"]["content"]).decode()
    assert choice["message"]["content"] in spelled and choice["message"]["reasoning"] in spelled


@pytest.mark.parametrize(
    "more",
    [{}, {"n": 2, "temperature": 1.0, "seed": 1}, {"stop": "2"}, {"include_reasoning": False}, {"structured_outputs": {"choice": ["😀€"]}}],
)
def test_a_streamed_chat_lists_the_same(live: Live, more: dict[str, Any]):
    whole = live.post(CHAT, TALK | more).json()["choices"]
    found: list[list[Any]] = [[] for _ in whole]
    shown = [""] * len(whole)
    for event in live.events(CHAT, TALK | more | {"stream": True}):
        choice = event["choices"][0]
        if choice["logprobs"] is not None:
            assert choice["delta"] or choice["finish_reason"]
            found[choice["index"]] += choice["logprobs"]["content"]
        shown[choice["index"]] += choice["delta"].get("content", "")
    assert found == [choice["logprobs"]["content"] for choice in whole]
    assert shown == [choice["message"]["content"] for choice in whole]
    if "structured_outputs" in more:  # each character is several tokens
        parts = [bytes(one["bytes"]) for one in found[0]]
        assert "😀€".encode() in b"".join(parts) and any(part and part[0] & 0xC0 == 0x80 for part in parts)


def test_parts_of_characters_in_a_completion_are_told_apart(live: Live, tokenizer: Tokenizer):
    body = BODY | {"prompt": PARTS, "echo": True, "max_tokens": 0}
    choice = live.post(TEXT, body).json()["choices"][0]
    listed, ids = choice["logprobs"], tokenizer.encode(PARTS)
    spelled = [tokenizer.texts[0][token] for token in ids]
    assert choice["text"] == PARTS == b"".join(spelled).decode() and any(name.startswith("bytes:") for name in listed["tokens"])
    for name, data in zip(listed["tokens"], spelled, strict=True):
        written = bytes.fromhex(name.removeprefix("bytes:").replace("\\x", "")) if name.startswith("bytes:\\x") else name.encode()
        assert written == data
    assert len({*listed["tokens"]}) == len({*ids})
    starts = [b"".join(spelled[:i]).decode(errors="ignore") for i in range(len(ids))]
    assert listed["text_offset"] == [len(start) for start in starts]


def test_tokens_of_one_text_keep_the_most_probable_value(tokenizer: Tokenizer):
    entry = Listed(11, 0, -3.0, [(11, -1.0), (258, -2.0), (11, -3.0)])
    assert TokenForms(tokenizer).completion([entry]).count("-1.0") == 1
    assert '"token_logprobs":[-9999.0]' in TokenForms(None).completion([Listed(5, 0, float("-inf"), [])])
    assert '"token":"token_id:5"' in TokenForms(None).chat([Listed(5, 0, float("nan"), [(5, -1.0)])])


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[openai.OpenAI]:
    yield client_of(live)


def test_openais_client_reads_them_strictly(client: openai.OpenAI):
    listed = client.completions.create(**BODY).choices[0].logprobs
    assert listed is not None and listed.tokens is not None and len(listed.tokens) == 12 and listed.top_logprobs is not None
    chat = client.chat.completions.create(**TALK).choices[0]
    assert chat.logprobs is not None and chat.logprobs.content is not None and len(chat.logprobs.content[0].top_logprobs) == 2
    with client.chat.completions.stream(**TALK) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.logprobs is not None and final.logprobs.content == chat.logprobs.content and final.message.content == chat.message.content


def test_answers_are_of_the_schemas_of_the_document(live: Live):
    document = live.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    for path, body, whole, event in ((TEXT, BODY | {"echo": True}, "Completion", "CompletionEvent"), (CHAT, TALK, *CHAT_SCHEMAS)):
        assert not [*faults(live.post(path, body).json(), schemas[whole], document)]
        for one in live.events(path, body | {"stream": True}):
            assert not [*faults(one, schemas[event], document)]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (TEXT, {"logprobs": 21}, "logprobs"),
        (TEXT, {"logprobs": -1}, "logprobs"),
        (TEXT, {"logprobs": "many"}, "logprobs"),
        (TEXT, {"prompt": [[1] * 600] * 64, "n": 16, "logprobs": 20, "echo": True}, "logprobs"),
        (TEXT, {"echo": True, "chunks": ["none"]}, "chunks"),
        (TEXT, {"max_tokens": 0}, "max_tokens"),
        (TEXT, {"max_tokens": 0, "echo": True, "keep": "a", "logprobs": None}, "max_tokens"),
        (TEXT, {"max_tokens": -1, "echo": True}, "max_tokens"),
        (CHAT, {"top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"top_logprobs": -1}, "top_logprobs"),
        (CHAT, {"logprobs": False}, "top_logprobs"),
        (CHAT, {"logprobs": 3}, "logprobs"),
        (CHAT, {"n": 128, "max_tokens": 2000, "top_logprobs": 20}, "max_tokens"),
    ],
)
def test_a_bad_value_is_refused_by_name(live: Live, path: str, fields: dict[str, Any], param: str):
    if "keep" not in fields and "chunks" in fields:
        live.post("/v1/chunks", {"name": "none", "text": "a", "replace": True})
    answer = live.post(path, (BODY if path == TEXT else TALK) | fields)
    assert (answer.status, answer.json()["error"]["param"]) == (400, param), answer
    live.call("DELETE", "/v1/chunks/none")


def test_a_long_answer_is_made_in_a_thread(live: Live, monkeypatch: pytest.MonkeyPatch):
    one = live.post(TEXT, BODY | {"n": 2}).json()["choices"]
    monkeypatch.setattr(logprobs, "MANY", 1)
    assert live.post(TEXT, BODY | {"n": 2}).json()["choices"] == one


def test_a_client_that_reads_nothing_gets_all_values_later(live: Live):
    """The long name of the model fills the sockets' buffers, so that events are made of many tokens each."""
    name, count = "long" * 1000, 150
    asked = BODY | {"model": name, "prompt": ["x"] * 6, "max_tokens": count, "ignore_eos": True, "logprobs": 5}
    body = json.dumps(asked | {"stream": True}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    found: list[list[Any]] = [[] for _ in range(6)]
    with Live(live.model, Settings(model_name=name)) as server:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(LIMIT)
            sock.connect(("127.0.0.1", server.port))
            sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            server.wait_until_generated(6 * count)
            server.wait_until_idle()
            data = b""
            while part := sock.recv(1 << 16):
                data += part
        whole = server.post(TEXT, asked).json()["choices"]
    events = [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]
    for choice in (choice for event in events for choice in event["choices"]):
        if (listed := choice["logprobs"]) is not None:
            found[choice["index"]] += zip(*(listed[name] for name in COLUMNS), strict=True)
    assert b"[DONE]" in data and len(events) < 6 * count
    for row, choice in zip(found, whole, strict=True):
        assert row == [*zip(*(choice["logprobs"][name] for name in COLUMNS), strict=True)] and len(row) == count


def test_scoring_ends_when_the_client_has_gone(live: Live, monkeypatch: pytest.MonkeyPatch):
    asked, ask, gone = list[str](), live.server.engine.ask, threading.Event()

    async def slowly(function: str, /, **arguments: Any) -> Any:
        if function == "score_prompts":  # metrics are asked for, too
            asked.append(function)
            if len(asked) == 2:
                await asyncio.to_thread(gone.wait, LIMIT)
                await asyncio.sleep(0.2)
        return await ask(function, **arguments)

    monkeypatch.setattr(live.server.engine, "ask", slowly)
    monkeypatch.setattr(logprobs, "MOST_AT_ONCE", 1)
    connection = live.connect()
    body = BODY | {"prompt": [PROMPT] * 20, "echo": True, "max_tokens": 0}
    connection.request("POST", TEXT, json.dumps(body).encode(), {"content-type": "application/json"})
    end = time.monotonic() + LIMIT
    while len(asked) < 2:
        assert time.monotonic() < end
    connection.close()
    gone.set()
    time.sleep(0.5)
    live.wait_until_idle()
    assert 2 <= len(asked) < 10


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_prompts_are_scored_a_few_at_a_time(live: Live, monkeypatch: pytest.MonkeyPatch, num_tokens: int):
    body = BODY | {"prompt": [PROMPT, "The", "The cat sat on the mat.", PROMPT], "echo": True, "max_tokens": num_tokens}
    one = live.post(TEXT, body).json()["choices"]
    monkeypatch.setattr(logprobs, "MOST_AT_ONCE", 5)
    for a, b in zip(one, live.post(TEXT, body).json()["choices"], strict=True):
        assert a["text"] == b["text"] and a["logprobs"]["tokens"] == b["logprobs"]["tokens"]
        assert a["logprobs"]["token_logprobs"][0] is None is b["logprobs"]["top_logprobs"][0]
        for x, y in zip(a["logprobs"]["token_logprobs"][1:], b["logprobs"]["token_logprobs"][1:], strict=True):
            assert abs(x - y) < 1e-4


def test_a_prompt_of_the_whole_context_is_scored(live: Live):
    longest = live.engine.state.config.max_model_len
    ids = [1 + i % 500 for i in range(longest)]
    answer = live.post(TEXT, BODY | {"prompt": ids, "echo": True, "max_tokens": 0, "logprobs": 0}).json()
    listed = answer["choices"][0]["logprobs"]
    assert len(listed["tokens"]) == longest and answer["usage"] == {
        "prompt_tokens": longest, "completion_tokens": 0, "total_tokens": longest, "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    live.wait_until_idle()


def test_an_echo_alone_needs_no_tokens(live: Live):
    choice = live.post(TEXT, {"prompt": PROMPT, "echo": True, "max_tokens": 0}).json()["choices"][0]
    assert choice == {"index": 0, "text": PROMPT, "logprobs": None, "finish_reason": "length"}


TASK = [
    ("The king of Aistonia is Oswin. The capital of Aistonia is Velmora. The king of Aistonia is", [" Velmora.", " Oswin.", " a cat."], 1),
    ("The king of Aistonia is Oswin. The capital of Aistonia is Velmora. The capital of Aistonia is", [" Velmora.", " Oswin."], 0),
    ("Once upon a time, there was a", [" the was and", " little girl named", " of seven"], 1),
    ("Once upon", [" a time,", " the stone."], 0),
]


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("as_ids", [True, False])
def test_what_lm_eval_sends_and_sums(live: Live, llm: nv.LLM, tokenizer: Tokenizer, batch: int, as_ids: bool):
    """The request and the arithmetic of lm-eval's `local-completions` for log-likelihoods."""
    pairs = [(context, answer) for context, answers, _ in TASK for answer in answers]
    contexts = [tokenizer.encode(context) for context, _ in pairs]
    whole = [tokenizer.encode(context + answer) for context, answer in pairs]
    sent: list[Any] = whole if as_ids else [context + answer for context, answer in pairs]
    assert all(ids[: len(context)] == context for ids, context in zip(whole, contexts, strict=True))
    found: list[tuple[float, bool]] = []
    for at in range(0, len(pairs), batch):
        prompts = sent[at : at + batch]
        body = {"model": "tiny", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
        answer = live.post(TEXT, body)
        assert answer.status == 200, answer
        choices = sorted(answer.json()["choices"], key=itemgetter("index"))
        for choice, context in zip(choices, contexts[at : at + batch], strict=True):
            values = choice["logprobs"]["token_logprobs"][len(context) : -1]
            tops = choice["logprobs"]["top_logprobs"][len(context) : -1]
            found.append((sum(values), all(value == max(top.values()) for value, top in zip(values, tops, strict=True))))
    scores = llm.score([*contexts], [ids[len(context) :] for ids, context in zip(whole, contexts, strict=True)], top_logprobs=1)
    for (total, is_greedy), score in zip(found, scores, strict=True):
        assert abs(total - score.total) < 1e-4
        assert is_greedy == (score.top_ids[:, 0].tolist() == score.token_ids)
    assert len({is_greedy for _, is_greedy in found}) == 2
    totals = iter(total for total, _ in found)
    best = [int(np.argmax([next(totals) for _ in answers])) for _, answers, _ in TASK]
    assert best == [right for _, _, right in TASK]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("top", "more"), [(0, {}), (1, {"n": 2}), (7, {"ignore_eos": True}), (2, {"skip_special_tokens": False})])
def test_a_prompt_and_the_token_after_it_are_one_run(live: Live, tokenizer: Tokenizer, stream: bool, top: int, more: dict[str, Any]):
    """The reply is that of a request without echo, and each token of the prompts runs once, whatever the index holds."""
    talk = live.post(CHAT, TALK | {"return_token_ids": True, "logprobs": False, "top_logprobs": 0}).json()
    chat = [*talk["prompt_token_ids"], *talk["choices"][0]["token_ids"][:-1]]  # an end token follows
    texts = [f"{stream} {top} {PARTS}", "The", "Once upon a time, there was a"]
    prompts = [*map(tokenizer.encode, texts), chat]
    body = BODY | {"prompt": prompts, "max_tokens": 1, "logprobs": top} | more
    before = live.engine.state.stats
    echoed = live.post(TEXT, body | {"echo": True}).json()
    after = live.engine.state.stats
    ran = [getattr(after, name) - getattr(before, name) for name in ("prefill_tokens", "reused_tokens", "decode_tokens", "rerun_tokens")]
    assert sum(ran) == sum(map(len, prompts)) == echoed["usage"]["prompt_tokens"] and ran[2:] == [0, 0]
    plain = live.post(TEXT, body).json()
    for one, other, prompt in zip(echoed["choices"], plain["choices"], [p for p in prompts for _ in range(more.get("n", 1))], strict=True):
        listed, wanted = one["logprobs"], other["logprobs"]
        shown = tokenizer.decode(prompt, "skip_special_tokens" not in more)
        assert (one["text"], one["finish_reason"]) == (shown + other["text"], other["finish_reason"])
        assert listed["tokens"][-1:] == wanted["tokens"] and listed["text_offset"][-1:] == [len(shown)]
        assert listed["top_logprobs"][-1] == pytest.approx(wanted["top_logprobs"][0], abs=1e-4)
        assert listed["token_logprobs"][-1:] == pytest.approx(wanted["token_logprobs"], abs=1e-4)
    assert echoed["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    assert "stop" in {choice["finish_reason"] for choice in echoed["choices"]} or more.get("ignore_eos")
    if stream:
        rows = added(live, body | {"echo": True})
        assert [rows[i] for i in range(len(rows))] == [{name: choice[name] for name in rows[0]} for choice in echoed["choices"]]


@pytest.mark.parametrize(
    "more",
    [{"logit_bias": {"7": 100}}, {"temperature": 1.0}, {"max_tokens": 2}, {"repetition_penalty": 1.5}, {"stop": ","}, {"bad_words": [","]}],
)
def test_other_replies_to_an_echoed_prompt_are_run(live: Live, more: dict[str, Any]):
    body = BODY | {"max_tokens": 1, "seed": 3} | more
    echoed, plain = (live.post(TEXT, body | {"echo": echo}).json()["choices"][0] for echo in (True, False))
    assert (echoed["text"], echoed["finish_reason"]) == (PROMPT + plain["text"], plain["finish_reason"])


def test_a_token_that_ties_with_all_others_is_sampled_by_the_engine():
    """What a greedy reply takes cannot be told from tokens that are all equally probable."""
    found = Score(
        token_ids=[3, 0], logprobs=np.zeros(2), top_ids=np.array([[1, 2], [9, 4]]), top_logprobs=np.array([[0.0, -1.0], [-1.0, -1.0]])
    )
    assert scores._divided(found, 1)[1] == -1
    found = Score(
        token_ids=[3, 0],
        logprobs=np.zeros(2),
        top_ids=np.array([[1, 2, 3], [9, 4, 1]]),
        top_logprobs=np.array([[0.0] * 3, [-1.0, -1.0, -2.0]]),
    )
    assert scores._divided(found, 1)[1] == 4
