"""OpenAI's clients get what its API reference promises, by coroutines and without, whole and streamed."""

import asyncio
import hashlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from nanovllm.entrypoints.server.settings import Settings
from tests.entrypoints.server.live import LIMIT, Live
from tests.entrypoints.server.openai_clients import async_client_of, client_of

pytestmark = pytest.mark.unhooked  # uvloop's transports are of types of its own

HELLO: Any = [{"role": "user", "content": "Hello"}]
GREEDY: Any = {"model": "tiny", "temperature": 0}
# All documented fields, with values that must not change a greedy reply
COMPLETION: Any = GREEDY | {
    "prompt": "Once upon a time", "best_of": 2, "echo": False, "frequency_penalty": 0.0, "logit_bias": {"5": 0}, "logprobs": None,
    "max_tokens": 8, "n": 2, "presence_penalty": 0.0, "seed": -3, "stop": ["zzz"], "stream": False, "stream_options": None, "suffix": None,
    "top_p": 1.0, "user": "me",
}  # fmt: skip
CHAT: Any = GREEDY | {
    "messages": [
        {"role": "developer", "content": "Be brief.", "name": "dev"},
        {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Hi"}], "refusal": None, "name": "bot"},
        {"role": "user", "content": "Hello", "name": "Ann"},
    ],
    "audio": None, "frequency_penalty": 0, "logit_bias": {}, "logprobs": False, "max_completion_tokens": 64, "max_tokens": 99,
    "metadata": {"a": "b"}, "modalities": ["text"], "moderation": None, "n": 2, "parallel_tool_calls": True,
    "prediction": {"type": "content", "content": "Hi"}, "presence_penalty": 0, "prompt_cache_key": "k", "prompt_cache_retention": "24h",
    "reasoning_effort": "low", "response_format": {"type": "text"}, "safety_identifier": "s", "seed": 1, "service_tier": "auto",
    "stop": "zzz", "store": True, "stream": False, "stream_options": None, "tool_choice": "none",
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}, "strict": True}}],
    "top_logprobs": None, "top_p": 1, "user": "me", "verbosity": "low",
}  # fmt: skip


@pytest.fixture(scope="module")
def client(live: Live) -> openai.OpenAI:
    return client_of(live)


def test_models(live: Live, client: openai.OpenAI):
    (card,) = client.models.list()
    assert (card.id, card.object, card.owned_by) == ("tiny", "model", "nanovllm") and abs(card.created - time.time()) < 600
    assert client.models.retrieve("tiny") == card and card.to_dict()["max_model_len"] == live.engine.state.config.max_model_len
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("none/such")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_a_model_whose_name_has_slashes(live: Live):
    with Live(live.model, Settings(model_name="org/sub/model-1.0")) as server:
        client = client_of(server)
        assert client.models.retrieve("org/sub/model-1.0").id == "org/sub/model-1.0"
        assert server.get("/v1/models/org/sub/model-1.0").json() == server.get("/models/org%2Fsub%2Fmodel-1.0").json()
        assert client.completions.create(model="org/sub/model-1.0", prompt="a", max_tokens=1).model == "org/sub/model-1.0"
        for unknown in ("tiny", "org/sub", "org/sub/model-1.0/"):
            with pytest.raises(openai.NotFoundError):
                client.completions.create(model=unknown, prompt="a", max_tokens=1)
    with Live(live.model, Settings(any_model_name=True)) as server:
        assert client_of(server).chat.completions.create(model="gpt-x", messages=HELLO, max_tokens=1).model == "tiny"


def test_completions_with_all_documented_fields(live: Live, client: openai.OpenAI):
    plain = client.completions.create(**GREEDY, prompt="Once upon a time", max_tokens=8)
    both = client.completions.create(**COMPLETION)
    assert [choice.index for choice in both.choices] == [0, 1]
    assert {choice.text for choice in both.choices} == {plain.choices[0].text} and both.choices[0].finish_reason == "length"
    assert both.usage is not None and (both.usage.prompt_tokens, both.usage.completion_tokens, both.usage.total_tokens) == (4, 16, 20)
    assert both.usage.prompt_tokens_details is not None and both.object == "text_completion" and both.model == "tiny"

    async def the_same() -> openai.types.Completion:
        async with async_client_of(live) as other:
            return await other.completions.create(**COMPLETION)

    assert asyncio.run(the_same()).choices == both.choices


def test_completions_streamed(live: Live):
    client = client_of(live, _strict_response_validation=False)  # the client's own type demands a finish_reason of every piece
    whole, again = (client.completions.create(**COMPLETION) for _ in range(2))
    chunks = [*client.completions.create(**COMPLETION | {"stream": True, "stream_options": {"include_usage": True}})]
    assert chunks[-1].usage == again.usage and not chunks[-1].choices  # `again` finds the prompt in the cache, too
    texts = ["", ""]
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    assert sum(chunk.choices[0].finish_reason == "length" for chunk in chunks[:-1]) == 2


def test_chat_with_all_documented_fields(live: Live, client: openai.OpenAI):
    both = client.chat.completions.create(**CHAT)
    assert [choice.index for choice in both.choices] == [0, 1] and both.object == "chat.completion" and both.id.startswith("chatcmpl-")
    first = both.choices[0]
    assert (first.message.role, first.message.refusal, first.message.tool_calls, first.logprobs) == ("assistant", None, None, None)
    assert first.message == both.choices[1].message and first.message.content and first.finish_reason == "stop"
    usage = both.usage
    assert usage is not None and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens and usage.completion_tokens <= 128
    system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hel\nlo"}]
    system += [{"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Hello"}]
    plain = client.chat.completions.create(**GREEDY, messages=system, max_tokens=64)
    assert plain.choices[0].message == first.message and plain.usage is not None and plain.usage.prompt_tokens == usage.prompt_tokens

    async def the_same() -> openai.types.chat.ChatCompletion:
        async with async_client_of(live) as other:
            return await other.chat.completions.create(**CHAT)

    assert asyncio.run(the_same()).choices == both.choices


@pytest.mark.parametrize("usage", [False, True])
def test_chat_streamed(client: openai.OpenAI, usage: bool):
    whole, again = (client.chat.completions.create(**CHAT) for _ in range(2))
    options = {"stream": True, "stream_options": {"include_usage": usage}}
    chunks = [*client.chat.completions.create(**CHAT | options)]
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    if usage:
        last = chunks.pop()
        assert last.usage == again.usage and last.choices == []  # `again` finds the prompt in the cache, too
    assert all(chunk.usage is None for chunk in chunks)
    for choice in whole.choices:
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert [one.delta.role for one in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert "".join(one.delta.content or "" for one in mine) == choice.message.content
        assert [one.finish_reason for one in mine] == [None] * (len(mine) - 1) + [choice.finish_reason]
    assert [chunk.choices[0].index for chunk in chunks[:2]] == [0, 1]


def test_the_accumulator_of_the_client(live: Live, client: openai.OpenAI):
    asked = {name: value for name, value in CHAT.items() if name not in ("stream", "tools", "tool_choice", "parallel_tool_calls")}
    whole, again = (client.chat.completions.create(**asked) for _ in range(2))
    with client.chat.completions.stream(**asked | {"stream_options": {"include_usage": True}}) as stream:
        events = [*stream]
        final = stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == [choice.message.content for choice in whole.choices]
    assert [choice.finish_reason for choice in final.choices] == [choice.finish_reason for choice in whole.choices]
    assert final.usage == again.usage
    assert {event.type for event in events} == {"chunk", "content.delta", "content.done"}

    async def collected() -> Any:
        async with async_client_of(live) as other, other.chat.completions.stream(**asked) as stream:
            return await stream.get_final_completion()

    assert asyncio.run(collected()).choices == final.choices


def test_a_stop_string_of_a_chat(client: openai.OpenAI):
    text = client.chat.completions.create(**GREEDY, messages=HELLO, max_tokens=12).choices[0].message.content
    assert text is not None and len(text) > 8
    asked = GREEDY | {"messages": HELLO, "max_tokens": 12, "stop": text[5:8]}
    choice = client.chat.completions.create(**asked).choices[0]
    assert (choice.message.content, choice.finish_reason) == (text[: text.index(text[5:8])], "stop")
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == choice.message.content and chunks[-1].finish_reason == "stop"


def test_a_message_is_continued(client: openai.OpenAI):
    text = client.chat.completions.create(**GREEDY, messages=HELLO, max_tokens=10).choices[0].message.content
    assert text
    begun = [*HELLO, {"role": "assistant", "content": text[:4]}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**GREEDY, messages=begun)
    assert caught.value.param == "messages[1].role"
    more = {"continue_final_message": True, "add_generation_prompt": False, "return_token_ids": True}
    answer = client.chat.completions.create(**GREEDY, messages=begun, max_tokens=3, extra_body=more)
    (card,) = answer.to_dict()["choices"]
    assert len(card["token_ids"]) == 3 and answer.choices[0].message.content


@pytest.mark.parametrize("whole_ids", [False, True])
def test_token_ids_are_told_if_asked_for(live: Live, whole_ids: bool):
    prompt: Any = [5, 6, 7] if whole_ids else "Once upon a time"
    asked = GREEDY | {"prompt": prompt, "max_tokens": 12, "n": 2, "stop": [" Jonas"], "return_token_ids": True}
    choices = live.post("/v1/completions", asked).json()["choices"]
    prompt_ids = prompt if whole_ids else live.model.tokenizer.encode(prompt)
    for choice in choices:
        assert choice["prompt_token_ids"] == prompt_ids
        assert live.model.tokenizer.decode(choice["token_ids"]).startswith(choice["text"])
    told: dict[int, list[int]] = {0: [], 1: []}
    first: list[int] = []
    for event in live.events("/v1/completions", asked | {"stream": True}):
        (choice,) = event["choices"]
        if choice["index"] not in first:
            first.append(choice["index"])
            assert choice["prompt_token_ids"] == prompt_ids
        else:
            assert "prompt_token_ids" not in choice
        told[choice["index"]] += choice["token_ids"]
    assert list(told.values()) == [choice["token_ids"] for choice in choices]
    assert "token_ids" not in live.post("/v1/completions", asked | {"return_token_ids": False}).json()["choices"][0]


def test_token_ids_of_a_chat(live: Live):
    asked = GREEDY | {"messages": HELLO, "max_tokens": 12, "return_token_ids": True}
    whole = live.post("/v1/chat/completions", asked).json()
    assert whole["prompt_token_ids"] == live.post("/tokenize", {"messages": HELLO}).json()["tokens"]
    first, *events = live.events("/v1/chat/completions", asked | {"stream": True})
    assert first["prompt_token_ids"] == whole["prompt_token_ids"] and not any("prompt_token_ids" in event for event in events)
    told = [i for event in events for i in event["choices"][0].get("token_ids", [])]
    assert told == whole["choices"][0]["token_ids"] and len(told) == whole["usage"]["completion_tokens"]
    plain = live.post("/v1/chat/completions", asked | {"return_token_ids": None}).json()
    assert "prompt_token_ids" not in plain and "token_ids" not in plain["choices"][0]


# Errors


def refusals() -> Iterator[tuple[str, dict[str, Any], str | None, str | None]]:
    chat, text = "chat", "text"
    for kind in (chat, text):
        yield kind, {"temperature": -1}, "temperature", None
        yield kind, {"top_p": 2}, "top_p", None
        yield kind, {"n": 0}, "n", None
        yield kind, {"max_tokens": 0}, "max_tokens", None
        yield kind, {"max_tokens": 10**6}, "messages" if kind == chat else "prompt", "context_length_exceeded"
        yield kind, {"stream_options": {"include_usage": True}}, "stream_options", None
        yield kind, {"stream_options": {}}, "stream_options", None
        yield kind, {"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage", None
        yield kind, {"extra_body": {"allowed_token_ids": [3]}}, "allowed_token_ids", "unsupported_parameter"
        yield kind, {"extra_body": {"skip_special_tokens": 3}}, "skip_special_tokens", None
        yield kind, {"extra_body": {"min_tokens": 3}}, "min_tokens", None
        yield kind, {"extra_body": {"min_tokens": 1.5}}, "min_tokens", None
        yield kind, {"extra_body": {"bad_words": "a"}}, "bad_words", None
        yield kind, {"extra_body": {"bad_words": ["a"] * 129}}, "bad_words", None
        yield kind, {"extra_body": {"response_format": {"type": "hiccup"}}}, "response_format.type", None
        yield kind, {"extra_body": {"response_format": "json_object"}}, "response_format", None
        for field in ("grammar", "ebnf", "structural_tag"):
            yield kind, {"extra_body": {field: {"type": "object"}}}, field, "unsupported_parameter"
    yield text, {"best_of": 129}, "best_of", None
    yield text, {"suffix": "."}, "suffix", "unsupported_parameter"
    yield chat, {"max_completion_tokens": 0}, "max_completion_tokens", None
    yield chat, {"extra_body": {"echo": True}}, "echo", "unsupported_parameter"
    yield chat, {"audio": {"format": "mp3", "voice": "ash"}}, "audio", "unsupported_parameter"
    yield chat, {"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"
    yield chat, {"web_search_options": {}}, "web_search_options", "unsupported_parameter"
    yield chat, {"extra_body": {"chat_template": "{{ 1 }}"}}, "chat_template", "unsupported_parameter"
    yield chat, {"messages": []}, "messages", None
    yield chat, {"messages": [{"role": "user"}]}, "messages[0].content", None
    yield chat, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type", None
    yield chat, {"reasoning_effort": "much"}, "reasoning_effort", None
    yield chat, {"tool_choice": "required"}, "tool_choice", None
    tools = [{"type": "function", "function": {"name": "f"}}]
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):  # the packaged model has no format of tool calls
        yield chat, {"tools": tools, "tool_choice": choice}, "tool_choice", "unsupported_parameter"
    yield chat, {"tools": tools, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name", None


@pytest.mark.parametrize(("kind", "fields", "param", "code"), [*refusals()])
def test_a_refused_request_names_the_field(client: openai.OpenAI, kind: str, fields: Any, param: str | None, code: str | None):
    with pytest.raises(openai.BadRequestError) as caught:
        if kind == "chat":
            client.chat.completions.create(**{"model": "tiny", "messages": HELLO, "max_tokens": 1, **fields})
        else:
            client.completions.create(**{"model": "tiny", "prompt": "a", "max_tokens": 1, **fields})
    assert (caught.value.param, caught.value.code, caught.value.type) == (param, code, "invalid_request_error")
    assert caught.value.request_id


def test_errors_are_the_clients_classes(live: Live):
    digest = hashlib.sha256(b"secret").digest()
    with Live(live.model, Settings(api_keys=(digest,), shutdown_seconds=0.1)) as server:
        with pytest.raises(openai.AuthenticationError) as refused:
            client_of(server).models.list()
        assert refused.value.code == "invalid_api_key"
        client = client_of(server, api_key="secret")
        raw = client.chat.completions.with_raw_response.create(
            model="tiny", messages=HELLO, max_tokens=1, extra_headers={"X-Request-Id": "abc-1"}
        )
        assert raw.headers["x-request-id"] == "abc-1" and raw.parse().usage is not None
        assert client.models.with_raw_response.list().headers["x-request-id"]
        server.stop_engine()
        with pytest.raises(openai.InternalServerError) as failed:
            client.completions.create(model="tiny", prompt="a")
        assert (failed.value.status_code, failed.value.code) == (503, "engine_unavailable")


def test_an_error_in_a_stream_is_raised_by_the_client(live: Live):
    with Live(live.model) as server:
        asked: Any = {**GREEDY, "messages": HELLO, "stream": True, "extra_body": {"ignore_eos": True}}
        with client_of(server).chat.completions.create(**asked) as stream:
            next(iter(stream))
            server.stop_engine()
            with pytest.raises(openai.APIError, match="the engine has failed"):
                for _ in stream:
                    pass


def test_a_full_queue_is_tried_again_by_the_client(live: Live):
    with Live(live.model, max_num_seqs=1, limits={"max_waiting": 1}) as server:
        client = client_of(server)
        long: Any = GREEDY | {"prompt": "a", "max_tokens": 1900, "stream": True, "extra_body": {"ignore_eos": True}}
        running = client_of(server, _strict_response_validation=False).completions.create(**long)
        next(iter(running))
        waiting = threading.Thread(target=lambda: client.completions.create(model="tiny", prompt="b", max_tokens=1))
        waiting.start()
        end = time.monotonic() + LIMIT
        while not server.engine.state.waiting:
            assert time.monotonic() < end
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="tiny", prompt="c", max_tokens=1)
        assert caught.value.code == "queue_full" and caught.value.response.headers["retry-after"] == "1"
        hooks = {"response": [lambda response: running.close() if response.status_code == 429 else None]}
        patient = client_of(server, max_retries=60, http_client=httpx.Client(event_hooks=hooks))
        raw = patient.completions.with_raw_response.create(model="tiny", prompt="c", max_tokens=1)
        assert raw.retries_taken >= 1 and raw.parse().choices[0].finish_reason == "length"
        waiting.join(LIMIT)
        server.wait_until_idle()
