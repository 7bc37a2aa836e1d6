"""LangChain's standard suites for both chat models, with the packaged model and with a scripted one.

The scripted model writes what a large model would: its tokens are forced through the real scheduler, grammars, parsers and HTTP. The
packaged model has no tools, and cannot write a joke on request, but it has the form of one.
"""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("langchain_tests", reason="needs langchain-tests: pip install -e 'integrations/langchain-nanovllm[test]'")

from langchain_core.messages import AIMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests
from nanovllm.entrypoints.openai_chat import OpenAIChat
from tests.entrypoints.server.live import Live
from tests.entrypoints.server.scripted import scripted, scripted_model

from langchain_nanovllm import ChatNanoVLLM, ChatNanoVLLMInProcess

JOKE = {"setup": "Why did the cat sit on the computer?", "punchline": "To keep an eye on the mouse."}
LAST = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", re.S)
# what the last message says, the tool that is called then, and its arguments
CALLS: list[tuple[str, str, dict[str, Any]]] = [
    ("magic_function(3)", "magic_function", {"input": 3}),
    ("magic_function_no_args()", "magic_function_no_args", {}),
    ("Pirate greeting", "greeting_generator", {"answer_style": "pirate"}),
    ("weather in San Francisco", "get_weather", {"location": "San Francisco, CA"}),
    ("Hello!", "magic_function", {"input": 1}),
    ("What is 3 + 4", "my_adder_tool", {"a": 3, "b": 4}),
    ("你好啊集团", "unicode_customer", {"customer_name": "你好啊集团", "description": "技术公司"}),
    ("こんにちは株式会社", "unicode_customer", {"customer_name": "こんにちは株式会社", "description": "日本の会社"}),
    ("joke", "Joke", JOKE),
    ("joke", "JokeDict", JOKE),
]


def reply_to(prompt: str) -> str:
    """What the scripted model replies: a call of the tool that the last message asks for, a joke as JSON, or a sentence."""
    last = LAST.findall(prompt)[-1]
    if "<tool_response>" not in last:
        for words, tool, arguments in CALLS:
            if words in last and f'"name": "{tool}"' in prompt:
                call = json.dumps({"name": tool, "arguments": arguments}, ensure_ascii=False)
                return f"<tool_call>\n{call}\n</tool_call>"
        if "joke" in last:
            return json.dumps(JOKE)
    return "Hello. All is well."


class TestUnitOverHTTP(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[ChatNanoVLLM]:
        return ChatNanoVLLM

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "tiny"}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        variables = {"NANOVLLM_API_KEY": "a key", "NANOVLLM_BASE_URL": "http://llm.example/v1"}
        return variables, {"model": "tiny"}, {"openai_api_key": "a key", "openai_api_base": "http://llm.example/v1"}


class TestUnitInProcess(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[ChatNanoVLLMInProcess]:
        return ChatNanoVLLMInProcess

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "tiny"}


class Suite(ChatModelIntegrationTests):
    """What the four runs of the integration suite share."""

    params: dict[str, Any]
    supports_model_override = False  # a server has one model, and so has an engine

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return self.params

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "json_schema"}

    @property
    def supported_usage_metadata_details(self) -> dict[Any, Any]:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        """The reply to a message that was sent before."""
        model = self.chat_model_class(**{**self.standard_chat_model_params, **self.chat_model_params})
        text = "Hello, hello and once more: hello to you and all your friends."
        model.invoke(text)
        if not stream:
            return model.invoke(text)
        whole = None
        for piece in model.stream(text):
            whole = piece if whole is None else whole + piece
        assert isinstance(whole, AIMessage)
        return whole


class TestPackagedOverHTTP(Suite):
    has_tool_calling = False  # the packaged model's template has no tools

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def served(cls) -> Iterator[None]:
        with Live() as live:
            cls.params = {"model": "tiny", "base_url": f"http://127.0.0.1:{live.port}/v1"}
            yield

    @property
    def chat_model_class(self) -> type[ChatNanoVLLM]:
        return ChatNanoVLLM


class TestPackagedInProcess(Suite):
    has_tool_calling = False

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def loaded(cls) -> Iterator[None]:
        chat = OpenAIChat("tiny", device="cpu", num_pages=256)
        cls.params = {"model": "tiny", "chat": chat}
        yield
        asyncio.run(chat.close())

    @property
    def chat_model_class(self) -> type[ChatNanoVLLMInProcess]:
        return ChatNanoVLLMInProcess


class TestScriptedOverHTTP(Suite):
    supports_json_mode = True

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def served(cls) -> Iterator[None]:
        with scripted("hermes", reply_to=reply_to) as live:
            cls.params = {"model": "scripted", "base_url": f"http://127.0.0.1:{live.port}/v1"}
            yield

    @property
    def chat_model_class(self) -> type[ChatNanoVLLM]:
        return ChatNanoVLLM


class TestScriptedInProcess(Suite):
    supports_json_mode = True

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def loaded(cls) -> Iterator[None]:
        model, forced = scripted_model("hermes", reply_to)
        chat = OpenAIChat(model, process_logits=forced, num_pages=1024)
        cls.params = {"model": "scripted", "chat": chat}
        yield
        asyncio.run(chat.close())

    @property
    def chat_model_class(self) -> type[ChatNanoVLLMInProcess]:
        return ChatNanoVLLMInProcess
