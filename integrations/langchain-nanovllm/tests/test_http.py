"""`ChatNanoVLLM` beyond the standard suites: think blocks, chunks, and the options that OpenAI does not have."""

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import pytest

pytest.importorskip("langchain_openai", reason="needs langchain-openai: pip install -e 'integrations/langchain-nanovllm[test]'")

import openai
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.messages.ai import add_ai_message_chunks
from pydantic import BaseModel
from tests.entrypoints.server.live import Live
from tests.entrypoints.server.scripted import say, scripted

from langchain_nanovllm import ChatNanoVLLM

KING = "The king of Aistonia is Oswin."
THOUGHT = say("<think>\nHm.\n</think>\n\nYes.")


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with Live() as server:
        yield server


@pytest.fixture(scope="module")
def thinking() -> Iterator[Live]:
    with scripted("hermes") as server:
        yield server


def chat(server: Live, **options: Any) -> ChatNanoVLLM:
    given: dict[str, Any] = {"model": "tiny" if server.packaged else "scripted", "temperature": 0, "max_tokens": 200, **options}
    return ChatNanoVLLM(base_url=f"http://127.0.0.1:{server.port}/v1", **given)


def test_defaults_are_this_machine_and_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NANOVLLM_API_KEY", "NANOVLLM_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    model = ChatNanoVLLM(model="tiny")
    assert model.openai_api_base == "http://127.0.0.1:8000/v1" and model.root_client.api_key == "none" and model.stream_usage


@pytest.mark.parametrize("output_version", ["v0", "v1"])
def test_think_blocks_stay(thinking: Live, output_version: Literal["v0", "v1"]) -> None:
    model = chat(thinking, output_version=output_version)
    for reply in (model.invoke(THOUGHT), add_ai_message_chunks(*model.stream(THOUGHT))):
        assert reply.text == "Yes." and reply.additional_kwargs["reasoning_content"] == "Hm."
        assert [block["type"] for block in reply.content_blocks] == ["reasoning", "text"]
        assert reply.content_blocks[0].get("reasoning") == "Hm."
        assert reply.usage_metadata and reply.usage_metadata["output_token_details"]["reasoning"] == 3
        assert reply.response_metadata["model_provider"] == "nanovllm" and reply.response_metadata["finish_reason"] == "stop"
    hidden = model.invoke(THOUGHT, include_reasoning=False)
    assert hidden.text == "Yes." and "reasoning_content" not in hidden.additional_kwargs


def test_think_blocks_are_sent_back(thinking: Live) -> None:
    model = chat(thinking)
    kept = AIMessage("Yes.", additional_kwargs={"reasoning_content": "Hm."})
    blocks = AIMessage(
        [{"type": "reasoning", "reasoning": "Hm."}, {"type": "text", "text": "Yes."}], response_metadata={"output_version": "v1"}
    )
    for message in (kept, blocks):
        payload = model._get_request_payload([HumanMessage("Well?"), message, HumanMessage("Sure?")])
        assert payload["messages"][1]["reasoning_content"] == "Hm." and "reasoning_content" not in payload["messages"][0]
        assert model.invoke([HumanMessage("Well?"), message, HumanMessage(say("Sure."))]).text == "Sure."


def test_chunks_are_reused_and_kept(live: Live) -> None:
    assert live.post("/v1/chunks", {"name": "facts", "text": KING}).status == 200
    model = chat(live, chunks=["facts"])
    reply = model.invoke("Who is the king of Aistonia?", keep="talk")
    details = reply.usage_metadata and reply.usage_metadata["input_token_details"]
    assert details and details["cache_read"] >= 11
    told = reply.response_metadata["nanovllm"]
    assert told["chunks"] == ["facts"] and told["exact"] is True and told["kept"]["name"] == "talk"
    streamed = add_ai_message_chunks(*model.bind(chunks=["talk"], keep="talk", keep_replace=True).stream("And where?"))
    told = streamed.response_metadata["nanovllm"]
    assert told["chunks"] == ["talk"] and told["kept"]["name"] == "talk"
    assert streamed.usage_metadata and streamed.usage_metadata["input_token_details"]["cache_read"] > details["cache_read"]
    with pytest.raises(openai.NotFoundError, match="nothing"):
        model.invoke("Hello", chunks=["nothing"])


def test_closing_a_stream_cancels_its_request(live: Live) -> None:
    before = live.engine.state.stats.decode_tokens
    pieces = chat(live).stream("Once upon a time", ignore_eos=True, max_tokens=900)
    for _ in range(4):
        next(pieces)
    live.wait_until_running()
    pieces.close()  # pyright: ignore[reportAttributeAccessIssue]
    live.wait_until_idle()
    assert live.engine.state.stats.decode_tokens - before < 800


def test_options_reach_the_server(live: Live) -> None:
    question = "What is 27 + 38?"
    plain = chat(live).invoke(question).text
    assert chat(live, temperature=1.0, top_k=1).invoke(question).text == plain
    assert chat(live, temperature=1.0, min_p=1.0).invoke(question).text == plain
    assert chat(live).invoke(question, chat_template_kwargs={"enable_thinking": False}, min_tokens=40, max_tokens=40).usage_metadata
    with pytest.raises(openai.BadRequestError, match="min_p"):
        chat(live, min_p=7.0).invoke(question)
    with pytest.raises(openai.BadRequestError, match="chat_template_kwargs"):
        chat(live, chat_template_kwargs={"messages": "x"}).invoke(question)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[0-9]{3}"}, r"\d{3}"),
        ({"choice": ["left", "right"]}, "left|right"),
        ({"grammar": 'start: "<" /[a-z]{2,4}/ ">"'}, "<[a-z]{2,4}>"),
        ({"structured_outputs": {"json": {"type": "integer"}}}, r"-?\d+"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_forms_are_forced(live: Live, form: dict[str, Any], pattern: str) -> None:
    assert re.fullmatch(pattern, chat(live, chat_template_kwargs={"enable_thinking": False}).invoke("Say something.", **form).text)


def test_keys_without_names_are_not_invented(live: Live) -> None:
    class Animal(BaseModel):
        """An animal of a story."""

        kind: Literal["fox", "owl", "bear"]
        wild: bool

    reader = chat(live).with_structured_output(Animal, include_raw=True)
    found = reader.invoke("Tell me of a fox.")
    assert isinstance(found, dict) and isinstance(found["parsed"], Animal) and found["parsing_error"] is None
    assert set(json.loads(found["raw"].text)) == {"kind", "wild"}
    cut = chat(live, max_tokens=2).with_structured_output(Animal, include_raw=True)
    with pytest.raises(openai.LengthFinishReasonError):
        cut.invoke("Tell me of a fox.")
