"""`ChatNanoVLLMInProcess`: a chat model whose engine runs in this process."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.messages import AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from pydantic import Field, PrivateAttr, model_validator

from langchain_nanovllm.base import NanoVLLMOptions
from langchain_nanovllm.event_loop import LoopThread

if TYPE_CHECKING:
    from nanovllm.entrypoints.openai_chat import OpenAIChat


class ChatNanoVLLMInProcess(NanoVLLMOptions):
    """A chat model whose engine runs in this process: no server and no HTTP. Needs the extra `engine`.

    The model is loaded by the first call. All calls run together in one engine, also those of other models that were made with
    `chat=model.chat`. Options, tools, structured output and think blocks are those of `ChatNanoVLLM`. `chunks` also takes
    `nanovllm.Chunk` objects. A stream that is closed, or a task that is cancelled, ends its request before the next step.

    Attributes:
        model_name: The argument `model`: a folder, a repository or `"tiny"`.
        engine: Options of `nanovllm.entrypoints.openai_chat.OpenAIChat`, such as `num_pages`.

    Examples:
        >>> model = ChatNanoVLLMInProcess(model="tiny", temperature=0, engine={"device": "cpu", "num_pages": 64})
        >>> model.invoke("What is 27 + 38?").content
        '27 + 38 = 65.'
        >>> model.close()
    """

    model_name: str = Field(default="tiny", alias="model")
    engine: dict[str, Any] = Field(default_factory=dict)
    chat: Any = Field(default=None, exclude=True)
    """The engine, an `OpenAIChat`. None: the first call makes it."""

    _lock: Any = PrivateAttr(default_factory=threading.Lock)
    _thread: LoopThread | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def validate_environment(self) -> Self:
        """Nothing of the environment is read: there are no keys and no clients."""
        return self

    def loaded(self) -> "OpenAIChat":
        """The engine, which is made if there is none. `loaded().llm` is the `AsyncLLM`.

        Raises:
            ModuleNotFoundError: The extra `engine` is not installed.
            NanoVLLMError: The model cannot be loaded.
        """
        try:
            from nanovllm.entrypoints.openai_chat import OpenAIChat
        except ModuleNotFoundError as error:
            told = f"{error}: ChatNanoVLLMInProcess needs the engine, pip install 'langchain-nanovllm[engine]'"
            raise ModuleNotFoundError(told, name=error.name) from None
        with self._lock:
            if self.chat is None:
                self.chat = OpenAIChat(self.model_name, **self.engine)
            return self.chat

    def close(self) -> None:
        """End the engine. Requests in flight end with `EngineClosedError`."""
        if self.chat is not None:
            self._loop().run(self.chat.close())

    def _loop(self) -> LoopThread:
        with self._lock:
            if self._thread is None:
                self._thread = LoopThread()
            return self._thread

    def _body(self, messages: list[BaseMessage], stop: list[str] | None, options: Mapping[str, Any]) -> dict[str, Any]:
        """The request as the engine takes it."""
        from nanovllm.errors import InvalidRequestError

        if options.get("model") not in (None, self.model_name):
            raise InvalidRequestError(f"model={options['model']!r}: this engine has {self.model_name!r}; make another model for it")
        payload = self._get_request_payload(messages, stop=stop, **options)
        return {**payload, **payload.pop("extra_body", {})}

    def _streamed(self, messages: list[BaseMessage], stop: list[str] | None, options: dict[str, Any]) -> dict[str, Any]:
        """The request of a stream, which asks for the usage as `stream_usage` says."""
        usage = self._should_stream_usage(options.pop("stream_usage", None), **options)
        more = {"stream_options": {"include_usage": True}} if usage else {}
        return self._body(messages, stop, {**options, "stream": True, **more})

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        answer = self._loop().run(self.loaded().create(self._body(messages, stop, kwargs)))
        return self._create_chat_result(answer)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        chat = await self._aloaded()
        return self._create_chat_result(await chat.create(self._body(messages, stop, kwargs)))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        events = self._loop().iterate(self.loaded().stream(self._streamed(messages, stop, kwargs)))
        with closing(events):  # pyright: ignore[reportArgumentType]
            for event in events:
                if (piece := self._convert_chunk_to_generation_chunk(event, AIMessageChunk, None)) is not None:
                    if run_manager:
                        run_manager.on_llm_new_token(piece.text, chunk=piece)
                    yield piece

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        chat = await self._aloaded()
        async with aclosing(chat.stream(self._streamed(messages, stop, kwargs))) as events:
            async for event in events:
                if (piece := self._convert_chunk_to_generation_chunk(event, AIMessageChunk, None)) is not None:
                    if run_manager:
                        await run_manager.on_llm_new_token(piece.text, chunk=piece)
                    yield piece

    async def _aloaded(self) -> "OpenAIChat":
        """The engine. A thread loads it, so that the event loop goes on."""
        return self.chat or await asyncio.to_thread(self.loaded)
