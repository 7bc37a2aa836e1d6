"""`ChatNanoVLLMInProcess` beyond the standard suites: loading, chunks as values, cancelled requests, event loops."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langchain_openai", reason="needs langchain-openai: pip install -e 'integrations/langchain-nanovllm[test]'")

import nanovllm as nv
from langchain_core.messages.ai import add_ai_message_chunks
from langchain_core.tools import tool
from nanovllm.entrypoints.openai_chat import OpenAIChat
from tests.entrypoints.server.live import Live
from tests.entrypoints.server.scripted import say, scripted_model

from langchain_nanovllm import ChatNanoVLLM, ChatNanoVLLMInProcess

KING = "The king of Aistonia is Oswin."
QUESTION = "What is 27 + 38?"
LONG: dict[str, Any] = {"ignore_eos": True, "max_tokens": 600}


@pytest.fixture(scope="module")
def model() -> Iterator[ChatNanoVLLMInProcess]:
    made = ChatNanoVLLMInProcess(model="tiny", temperature=0, max_tokens=200, engine={"device": "cpu", "num_pages": 128})
    assert made.chat is None  # the first call loads it
    yield made
    made.close()


def wait_until_idle(model: ChatNanoVLLMInProcess) -> None:
    end = time.monotonic() + 60
    while model.loaded().llm.state.running:
        assert time.monotonic() < end
        time.sleep(0.002)
    nv.check(model.loaded().llm.state)


def test_replies_are_those_of_a_server(model: ChatNanoVLLMInProcess) -> None:
    with Live() as live:
        served = ChatNanoVLLM(model="tiny", base_url=f"http://127.0.0.1:{live.port}/v1", temperature=0, max_tokens=200)
        for more in ({}, {"chat_template_kwargs": {"enable_thinking": False}}, {"stop": ["65"]}, {"choice": ["left", "right"]}):
            ours, theirs = model.invoke(QUESTION, **more), served.invoke(QUESTION, **more)
            assert ours.content == theirs.content and ours.additional_kwargs.get("reasoning_content") == theirs.additional_kwargs.get(
                "reasoning_content"
            )
            assert ours.usage_metadata and theirs.usage_metadata
            assert ours.usage_metadata["total_tokens"] == theirs.usage_metadata["total_tokens"]
            streamed = add_ai_message_chunks(*model.stream(QUESTION, **more))
            assert streamed.content == ours.content and streamed.usage_metadata


def test_chunks_are_values(model: ChatNanoVLLMInProcess) -> None:
    chat = model.loaded()
    facts = asyncio.run(chat.llm.apply(lambda loaded, state: nv.prefill(loaded, state, KING)))
    assert facts is not None
    reply = model.invoke("Who is the king of Aistonia?", chunks=[facts], keep="talk")
    assert reply.usage_metadata and reply.usage_metadata["input_token_details"]["cache_read"] >= len(facts)
    assert reply.response_metadata["nanovllm"]["kept"]["tokens"] == len(chat.chunks["talk"])
    again = add_ai_message_chunks(*model.stream("And where?", chunks=["talk"]))
    assert again.usage_metadata and again.usage_metadata["input_token_details"]["cache_read"] >= len(chat.chunks["talk"])
    with pytest.raises(nv.UnknownChunkError, match="nothing"):
        model.invoke("Hello", chunks=["nothing"])


def test_closing_a_stream_cancels_its_request(model: ChatNanoVLLMInProcess) -> None:
    pieces = model.stream("Once upon a time", **LONG)
    for _ in range(4):
        next(pieces)
    assert model.loaded().llm.state.running
    pieces.close()  # pyright: ignore[reportAttributeAccessIssue]
    wait_until_idle(model)


def test_closing_an_asynchronous_stream_cancels_its_request(model: ChatNanoVLLMInProcess) -> None:
    async def main() -> None:
        pieces = model.astream("Once upon a time", **LONG)
        for _ in range(4):
            await anext(pieces)
        assert model.loaded().llm.state.running
        await pieces.aclose()  # pyright: ignore[reportAttributeAccessIssue]

    asyncio.run(main())
    wait_until_idle(model)


def test_cancelling_a_task_cancels_its_request(model: ChatNanoVLLMInProcess) -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await model.ainvoke("Once upon a time", **LONG)

    asyncio.run(main())
    wait_until_idle(model)


def test_calls_wait_within_a_running_event_loop(model: ChatNanoVLLMInProcess) -> None:
    async def cell() -> tuple[str, str]:  # as in a notebook
        return model.invoke(QUESTION).text, add_ai_message_chunks(*model.stream(QUESTION)).text

    whole, streamed = asyncio.run(cell())
    assert whole == streamed == asyncio.run(model.ainvoke(QUESTION)).text


def test_batches_run_together(model: ChatNanoVLLMInProcess) -> None:
    async def main() -> list[Any]:
        return await model.abatch([QUESTION] * 4)

    assert {reply.text for reply in asyncio.run(main())} == {model.invoke(QUESTION).text}


@tool
def add(first: int, second: int) -> int:
    """Add two integers."""
    return first + second


def test_tools_are_forced_and_think_blocks_stay() -> None:
    made, forced = scripted_model("hermes")
    chat = OpenAIChat(made, process_logits=forced, num_pages=512)
    model = ChatNanoVLLMInProcess(model="scripted", chat=chat, max_tokens=300)
    call = '<tool_call>\n{"name": "add", "arguments": {"first": 27, "second": 38}}\n</tool_call>'
    text = say("<think>\nHm.\n</think>\n\n" + call, "It is 65.")
    for choice in ("auto", "any", "add"):
        bound = model.bind_tools([add], tool_choice=choice)
        for reply in (bound.invoke(text), add_ai_message_chunks(*bound.stream(text))):
            assert [(each["name"], each["args"]) for each in reply.tool_calls] == [("add", {"first": 27, "second": 38})]
            assert reply.additional_kwargs["reasoning_content"] == "Hm."
    after = model.bind_tools([add]).invoke([("user", text), reply, add.invoke(reply.tool_calls[0])])
    assert after.text == "It is 65."
    model.close()


def test_what_is_refused(model: ChatNanoVLLMInProcess) -> None:
    with pytest.raises(nv.InvalidRequestError, match="model='other'"):
        model.invoke(QUESTION, model="other")
    with pytest.raises(nv.InvalidRequestError, match="min_p"):
        model.invoke(QUESTION, min_p=7.0)
    with pytest.raises(nv.InvalidRequestError, match="logprobs"):
        model.invoke(QUESTION, logprobs=True)


def test_a_closed_engine_says_so() -> None:
    made = ChatNanoVLLMInProcess(model="tiny", engine={"device": "cpu", "num_pages": 64})
    made.loaded()
    made.close()
    with pytest.raises(nv.EngineClosedError):
        made.invoke(QUESTION)


def test_without_the_engine_the_client_works_and_the_other_says_what_is_missing() -> None:
    program = """
import sys
sys.modules["nanovllm"] = None
from langchain_nanovllm import ChatNanoVLLM, ChatNanoVLLMInProcess
ChatNanoVLLM(model="tiny")
try:
    ChatNanoVLLMInProcess(model="tiny").invoke("Hello")
except ModuleNotFoundError as error:
    print(error)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=300, check=True)
    assert "pip install 'langchain-nanovllm[engine]'" in done.stdout
