"""`min_tokens`, `bad_words` and `skip_special_tokens` over HTTP: the library's replies, whole and streamed."""

from typing import Any

import pytest

import nanovllm as nv
from nanovllm.tokenizer.tokenizer import Tokenizer
from tests.entrypoints.server.live import Live

pytestmark = pytest.mark.unhooked  # uvloop's transports are of types of its own

TEXT, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def llm(live: Live) -> nv.LLM:
    return nv.LLM(live.model, num_pages=128)


@pytest.fixture(scope="module")
def tokenizer(live: Live) -> Tokenizer:
    assert live.model.tokenizer is not None
    return live.model.tokenizer


def texts(live: Live, fields: dict[str, Any]) -> list[tuple[str, str]]:
    """Text and reason of a completion: whole, and streamed."""
    body = {"model": "tiny", "prompt": PROMPT, "temperature": 0, **fields}
    choice = live.post(TEXT, body).json()["choices"][0]
    events = live.events(TEXT, body | {"stream": True})
    pieces = "".join(event["choices"][0]["text"] for event in events)
    return [(choice["text"], choice["finish_reason"]), (pieces, events[-1]["choices"][0]["finish_reason"])]


@pytest.mark.parametrize(
    "options",
    [
        {"min_tokens": 5, "stop": [" boy", ","]},
        {"min_tokens": 9, "stop_token_ids": [258, 11]},
        {"min_tokens": 12, "max_tokens": 12, "stop": ["a"]},
        {"bad_words": ["boy", " a boy named", ","]},
        {"bad_words": ["Jonas"], "min_tokens": 3, "stop": ["named"]},
    ],
)
def test_replies_are_those_of_the_library(live: Live, llm: nv.LLM, options: dict[str, Any]) -> None:
    params = nv.SamplingParams(**{"temperature": 0, "max_tokens": 12, **options})
    (output,) = llm.generate(PROMPT, params)
    assert texts(live, {"max_tokens": 12, **options}) == [(output.text, output.finish_reason)] * 2
    assert len(output.token_ids) >= params.min_tokens
    assert not any(word.strip() in output.text.split() for word in params.bad_words)
    (free,) = llm.generate(PROMPT, nv.SamplingParams(temperature=0, max_tokens=12))
    assert output.text != free.text or params.stop  # the options matter
    assert "".join(piece.text for piece in llm.stream(PROMPT, params)) == output.text


def test_chats_and_responses_have_these_fields(live: Live, tokenizer: Tokenizer) -> None:
    """A biased end token would end the reply at once; a biased bad word would be all of it."""
    end, word = live.model.config.eos_token_ids[0], tokenizer.encode("a", add_special_tokens=False)[0]
    for bias, options, most in (({end: 100}, {"min_tokens": 4}, 4), ({word: 100}, {"bad_words": ["a"]}, 5)):
        more = {"temperature": 0, "logit_bias": {str(token): value for token, value in bias.items()}}
        plain = live.post(CHAT, {"messages": MESSAGES, "max_tokens": most, **more}).json()
        chat = live.post(CHAT, {"messages": MESSAGES, "max_tokens": most, **more, **options}).json()
        response = live.post(RESPONSES, {"input": "Hello", "max_output_tokens": most, **more, **options}).json()
        contents, said = [part["text"] for item in response["output"] for part in item["content"]], chat["choices"][0]["message"]
        assert "".join(contents) == (said.get("reasoning") or "") + said["content"] and said != plain["choices"][0]["message"]
        assert chat["usage"]["completion_tokens"] == most == response["usage"]["output_tokens"]
        assert plain["usage"]["completion_tokens"] == (1 if "min_tokens" in options else most)


@pytest.mark.parametrize("skip", [None, True, False])
def test_special_tokens_are_shown_if_asked_for(live: Live, llm: nv.LLM, tokenizer: Tokenizer, skip: bool | None) -> None:
    end = live.model.config.eos_token_ids[0]
    name = tokenizer.decode([end], skip_special_tokens=False)
    fields = {"logit_bias": {str(end): 100}, "ignore_eos": True, "max_tokens": 3, "skip_special_tokens": skip, "logprobs": 0}
    shown = name * 3 if skip is False else ""
    assert texts(live, fields) == [(shown, "length")] * 2
    params = nv.SamplingParams(temperature=0, logit_bias={end: 100}, ignore_eos=True, max_tokens=3, skip_special_tokens=skip is not False)
    assert llm.generate(PROMPT, params)[0].text == shown == "".join(piece.text for piece in llm.stream(PROMPT, params))
    listed = live.post(TEXT, {"prompt": PROMPT, "temperature": 0, **fields}).json()["choices"][0]["logprobs"]
    assert listed["text_offset"] == [i * len(name) * (skip is False) for i in range(3)]
    chat = {"messages": MESSAGES, "temperature": 0, **fields, "logprobs": True}
    assert live.post(CHAT, chat).json()["choices"][0]["message"]["content"] == shown
    events = live.events(CHAT, chat | {"stream": True})
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == shown


def test_the_token_that_ends_a_reply_is_never_shown(live: Live) -> None:
    """As in vLLM: a reply ends before its end token, and before a stop string, which may be a special token."""
    end = live.model.config.eos_token_ids[0]
    fields = {"logit_bias": {str(end): 100}, "max_tokens": 3, "skip_special_tokens": False}
    assert texts(live, fields) == [("", "stop")] * 2
    named = live.model.tokenizer.decode([end], skip_special_tokens=False) if live.model.tokenizer else ""
    assert texts(live, {**fields, "ignore_eos": True, "stop": named[:5]}) == [("", "stop")] * 2
    assert texts(live, {**fields, "ignore_eos": True, "stop": named[:5], "min_tokens": 2}) == [(named * 2, "stop")] * 2
    assert texts(live, {**fields, "echo": True, "prompt": named})[0] == (named, "stop")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"min_tokens": 1.5}, "min_tokens"),
        ({"bad_words": ["a", ""]}, "bad_words"),
        ({"bad_words": "a"}, "bad_words"),
        ({"bad_words": ["a" * 200]}, "bad_words"),
        ({"bad_words": ["b"] * 200}, "bad_words"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens"),
    ],
)
def test_values_are_refused_by_name(live: Live, fields: dict[str, Any], param: str) -> None:
    for path, body in ((TEXT, {"prompt": "a"}), (CHAT, {"messages": MESSAGES})):
        answer = live.post(path, {"max_tokens": 4, **body, **fields})
        assert answer.status == 400 and answer.json()["error"]["param"] == param
