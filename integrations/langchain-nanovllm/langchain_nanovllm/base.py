"""What both chat models share: the options of nanovllm, requests, and replies."""

from typing import Any, Literal

import openai
from langchain_core.language_models import LangSmithParams, LanguageModelInput
from langchain_core.messages import AIMessageChunk
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_openai.chat_models.base import BaseChatOpenAI
from pydantic import Field

from langchain_nanovllm.replies import PROVIDER, marked, reasoning_of
from langchain_nanovllm.structured import is_pydantic, reading, response_format

# Fields of requests that OpenAI's client does not know, by the names that they have here and in nanovllm
EXTRA = (
    "top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "bad_words", "priority", "chat_template_kwargs",
    "include_reasoning", "structured_outputs", "keep", "keep_replace", "keep_thinking",
)  # fmt: skip
FORMS = ("grammar", "regex", "choice")  # members of `structured_outputs` that are options of their own here
TAKEN = (*EXTRA, *FORMS, "chunks")


class NanoVLLMOptions(BaseChatOpenAI):
    """The options of nanovllm. Each may be given to the constructor, to `bind` and to a single call."""

    top_k: int | None = None
    """Sample from the k most probable tokens only."""
    min_p: float | None = None
    """Drop tokens below `min_p` times the highest probability."""
    repetition_penalty: float | None = None
    """Makes tokens of the prompt and the reply less probable if above 1."""
    min_tokens: int | None = None
    """The reply cannot end before it has so many tokens."""
    stop_token_ids: list[int] | None = None
    """Token ids that end the reply."""
    ignore_eos: bool | None = None
    """Whether the reply goes on after the model's end token."""
    bad_words: list[str] | None = None
    """Strings that the reply cannot have."""
    priority: int | None = None
    """Requests of a lower number run first."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template, such as `{"enable_thinking": False}`."""
    include_reasoning: bool | None = None
    """False leaves the think block out of the reply."""
    structured_outputs: dict[str, Any] | None = None
    """A form of the reply, as vLLM has it: one of `json`, `regex`, `choice`, `grammar` and `json_object`."""
    grammar: str | None = None
    """A grammar in Lark that the reply obeys."""
    regex: str | None = None
    """A regular expression that the whole reply matches."""
    choice: list[str] | None = None
    """The reply is one of these."""
    chunks: list[Any] | None = None
    """Chunks before the conversation, whose KV is reused: names and, in process, `nanovllm.Chunk` objects."""
    keep: str | None = None
    """Makes a chunk of this name of the prompt and its reply."""
    keep_replace: bool | None = None
    """Whether `keep` may take the name of another chunk."""
    keep_thinking: bool | None = None
    """Whether the kept chunk has the reply's think block."""
    stream_usage: bool | None = True
    use_responses_api: bool | None = Field(default=False, exclude=True)

    @property
    def _llm_type(self) -> str:
        return f"{PROVIDER}-chat"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = PROVIDER
        return params

    def _get_request_payload(self, input_: LanguageModelInput, *, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        """The request as OpenAI's client takes it: what it does not know is in `extra_body`."""
        payload = super()._get_request_payload(input_, stop=stop, **kwargs)
        given = {name: value for name in TAKEN if (value := payload.pop(name, getattr(self, name))) is not None}
        forms = {name: given.pop(name) for name in FORMS if name in given}
        if forms:
            given["structured_outputs"] = {**given.get("structured_outputs", {}), **forms}
        if given or "extra_body" in payload:
            payload["extra_body"] = {**given, **(payload.get("extra_body") or {})}
        if is_pydantic(payload.get("response_format")):
            payload["response_format"] = response_format(payload["response_format"])
        for message, written in zip(self._convert_input(input_).to_messages(), payload["messages"], strict=True):
            if (reasoning := reasoning_of(message)) is not None:
                written["reasoning_content"] = reasoning
        return payload

    def _create_chat_result(self, response: dict | openai.BaseModel, generation_info: dict | None = None) -> ChatResult:
        result = super()._create_chat_result(response, generation_info)
        answer = response if isinstance(response, dict) else response.model_dump(exclude={"choices": {"__all__": {"message": {"parsed"}}}})
        for generation, choice in zip(result.generations, answer["choices"], strict=True):
            marked(generation, choice["message"], answer.get("nanovllm"))
        result.llm_output = {**(result.llm_output or {}), "model_provider": PROVIDER}
        return result

    def _convert_chunk_to_generation_chunk(
        self, chunk: dict, default_chunk_class: type, base_generation_info: dict | None
    ) -> ChatGenerationChunk | None:
        generation = super()._convert_chunk_to_generation_chunk(chunk, default_chunk_class, base_generation_info)
        event = chunk.get("chunk") or chunk  # the client's helper for structured output puts each event into one of its own
        choices = event.get("choices") or []
        if generation is not None and choices and isinstance(generation.message, AIMessageChunk):
            marked(generation, choices[0].get("delta") or {}, event.get("nanovllm"))
        return generation

    def with_structured_output(
        self,
        schema: Any = None,
        *,
        method: Literal["function_calling", "json_mode", "json_schema"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """A model whose replies have the form of a schema, which a grammar forces.

        Args:
            schema: A Pydantic class, a TypedDict or a JSON schema.
            method: "json_schema" works with every model. "function_calling" needs one with tools. "json_mode" forces JSON alone.
            include_raw: Whether the result also has the message.
            strict: Ignored: a grammar is always strict.
            **kwargs: As in `bind`.

        Returns:
            A runnable that gives an object of the class, or a dict.

        Examples:
            >>> from pydantic import BaseModel
            >>> class Animal(BaseModel):
            ...     kind: str
            >>> reader = model.with_structured_output(Animal)  # doctest: +SKIP
            >>> reader.invoke("Tell me of a fox.")  # doctest: +SKIP
            Animal(kind='fox')
        """
        if method == "json_schema":
            return reading(self, schema, include_raw=include_raw, **kwargs)
        return super().with_structured_output(schema, method=method, include_raw=include_raw, strict=strict, **kwargs)
