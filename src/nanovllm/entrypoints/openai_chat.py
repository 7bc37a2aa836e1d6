"""`OpenAIChat`: chat completions as OpenAI has them, from an engine in this process and without HTTP."""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from nanovllm.engine.prompt import Context
from nanovllm.engine.requests import capacity
from nanovllm.entrypoints.async_llm import AsyncLLM
from nanovllm.entrypoints.kept_chunks import KeptChunks
from nanovllm.entrypoints.server.api.chat import ChatRequest
from nanovllm.entrypoints.server.api.chat_parts import call_id, message_of, reply_parser
from nanovllm.entrypoints.server.api.prompts import INT32, usage
from nanovllm.entrypoints.server.constraints import chat_form, form_of
from nanovllm.entrypoints.server.errors import ApiError
from nanovllm.entrypoints.server.exchange import unique
from nanovllm.entrypoints.server.messages import ChatPrompt, chat_prompt
from nanovllm.entrypoints.server.reply import ReplyParser
from nanovllm.entrypoints.server.request_fields import read, sampling
from nanovllm.entrypoints.server.serving_tokenizer import AUTO, ReplyFormats
from nanovllm.entrypoints.server.tools.events import ArgumentsDelta, CallBegins, CallEnds, Content, Event, Reasoning, whole_reply
from nanovllm.errors import InvalidRequestError, NanoVLLMError
from nanovllm.loading.load_model import load_model
from nanovllm.models.model import Model
from nanovllm.sampling.params import SamplingParams, from_generation_config
from nanovllm.sampling.process_logits import LogitsProcessor
from nanovllm.state.chunk import Chunk
from nanovllm.state.request import RequestOutput

# What a server does with these fields is not done here. A value that asks for nothing is let through.
SERVER_ONLY = ("logprobs", "truncate_prompt_tokens", "cache_salt", "return_token_ids", "include_stop_str_in_output")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request that has been read.

    Attributes:
        fields: Its fields.
        prompt: What it says of its prompt.
        context: The prompt as the engine takes it.
        num_prompt: The tokens of the prompt, with its chunks.
        chunk: The chunk before the rendered conversation, or None.
        params: The options of sampling.
        parser: What divides the reply.
    """

    fields: ChatRequest
    prompt: ChatPrompt
    context: Context
    num_prompt: int
    chunk: Chunk | None
    params: SamplingParams
    parser: ReplyParser


class OpenAIChat:
    """Chat completions of one model: requests and answers are the JSON objects of `POST /v1/chat/completions`.

    Prompts, grammars, tool calls and think blocks are made and read by the functions of the server. Needs the extra `server`, and `grammar`
    for forced replies. Log-probabilities and several choices are for the server alone.

    Attributes:
        llm: The engine. Calls of the functional interface go to `llm.apply`.
        chunks: Chunks by name: those that requests have kept, and those that you add.

    Examples:
        >>> import asyncio
        >>> from nanovllm.entrypoints.openai_chat import OpenAIChat
        >>> async def main():
        ...     async with OpenAIChat("tiny", device="cpu", num_pages=64) as chat:
        ...         return await chat.create({"messages": [{"role": "user", "content": "What is 27 + 38?"}], "temperature": 0})
        >>> asyncio.run(main())["choices"][0]["message"]["content"]
        '27 + 38 = 65.'
    """

    __slots__ = ("_formats", "_generation", "_kept", "_process", "llm")

    def __init__(
        self,
        model: str | os.PathLike[str] | Model,
        *,
        tool_parser: str = AUTO,
        reasoning_parser: str = AUTO,
        process_logits: LogitsProcessor | Callable[..., Any] | None = None,
        dtype: Any = None,
        device: Any = None,
        **options: Any,
    ) -> None:
        """Load a model and start its engine.

        Args:
            model: A folder, a repository or `"tiny"`, as `load_model` takes them, or a `Model`.
            tool_parser: The format of tool calls: "auto" asks the chat template, "none" reads no calls.
            reasoning_parser: The format of think blocks, by the same words.
            process_logits: Changes the logits of every request, as in `AsyncLLM.generate`.
            dtype: As in `load_model`, for a model that is loaded here.
            device: As in `load_model`, for a model that is loaded here.
            **options: The other arguments of `AsyncLLM`.

        Raises:
            CheckpointError: The model cannot be loaded.
            InvalidRequestError: An option is invalid, or the model has no tokenizer.
            OutOfPagesError: The KV memory does not fit into the device.
        """
        if not isinstance(model, Model):
            model = load_model(model, dtype=dtype, device=device)
        if model.tokenizer is None:
            raise InvalidRequestError("this model has no tokenizer, so it cannot chat")
        self._formats = ReplyFormats.of(model.tokenizer, tool_parser, reasoning_parser)
        self._generation = from_generation_config(model.generation_config)
        self._process = process_logits
        self.llm = AsyncLLM(replace(model, tokenizer=self._formats.shown(model.tokenizer)), **options)
        self._kept = KeptChunks(self.llm)

    @property
    def chunks(self) -> dict[str, Chunk]:
        """Chunks by name."""
        return self._kept.chunks

    async def create(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request, whole.

        Args:
            body: The fields of `POST /v1/chat/completions`. An entry of `chunks` is a name or a `Chunk`.

        Returns:
            An object `chat.completion`.

        Raises:
            InvalidRequestError: A field is wrong, or this class does not have it.
            UnknownChunkError: `chunks` has a name that is not among `chunks`.
            ChunkExistsError: `keep` has a name that is, without `keep_replace`.
            NanoVLLMError: As in `AsyncLLM.generate`.
        """
        async with self._kept.before(body.get("chunks")) as chunk:
            asked = await self._read(body, chunk)
            how: Any = {"priority": asked.fields.priority or 0, "process_logits": self._process}
            (output,) = await self.llm.generate([asked.context], asked.params, **how)
            if output.error is not None:
                raise output.error
            parser, events = asked.parser.push(output.text)
            reply = whole_reply([*events, *parser.end()])
            message = message_of(reply, self._formats, shows_reasoning=asked.fields.include_reasoning is not False)
            choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _reason(asked, output, called=bool(reply.calls))}
            more = await self._told(asked, output)
            counted = self._usage(asked, output, reply.reasoning)
            return {**_head("chat.completion", self._name(asked)), "choices": [choice], "usage": counted, **more}

    async def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The answer to a request, as events. Closing the iterator cancels the request.

        Args:
            body: As in `create`. `stream` is taken to be true.

        Yields:
            Objects `chat.completion.chunk`; the last one has the usage, if `stream_options` asks for it.

        Raises:
            NanoVLLMError: As in `create`.
        """
        async with self._kept.before(body.get("chunks")) as chunk:
            asked = await self._read({**body, "stream": True}, chunk)
            head = _head("chat.completion.chunk", self._name(asked))
            yield _event(head, {"role": "assistant", "content": ""})
            parser, output, called, thoughts = asked.parser, None, False, ""
            how: Any = {"priority": asked.fields.priority or 0, "process_logits": self._process}
            async with aclosing(self.llm.stream(asked.context, asked.params, **how)) as pieces:
                async for piece in pieces:
                    parser, events = parser.push(piece.text)
                    output = piece.output
                    for event in events if output is None else [*events, *parser.end()]:
                        called |= isinstance(event, CallEnds) and event.complete
                        thoughts += event.source if isinstance(event, Reasoning) else ""
                        if delta := self._delta(asked, event):
                            yield _event(head, delta)
            assert output is not None
            yield {**_event(head, {}, _reason(asked, output, called=called)), **await self._told(asked, output)}
            options = asked.fields.stream_options
            if options is not None and options.include_usage:
                yield {**head, "choices": [], "usage": self._usage(asked, output, thoughts)}

    async def close(self, *, drain: bool = False) -> None:
        """End the engine, as `AsyncLLM.close` does."""
        await self.llm.close(drain=drain)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _read(self, body: Mapping[str, Any], chunk: Chunk | None) -> Asked:
        tokenizer = self.llm.tokenizer
        with _typed():
            fields = {name: value for name, value in body.items() if name != "chunks"}
            asked = read(fields, ChatRequest)
            for name in SERVER_ONLY:
                if fields.get(name):
                    raise InvalidRequestError(f"{name} is not supported without a server")
            if (asked.n or 1) != 1:
                raise InvalidRequestError(f"n={asked.n} must be 1 without a server")
            if asked.keep is not None:
                self._kept.require_free(asked.keep, replaced=bool(asked.keep_replace))
            form, prompt = form_of(fields), chat_prompt(fields)
            ids = await asyncio.to_thread(prompt.token_ids, tokenizer, most=self.llm.model.config.max_position_embeddings)
            before = 0 if chunk is None else len(chunk)
            limit = "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens"
            wanted = asked.max_tokens if limit == "max_tokens" else asked.max_completion_tokens
            left = capacity(self.llm.state, chunk) - before - len(ids)
            if left < (1 if wanted is None else wanted):
                more = "which leaves no room for a reply" if wanted is None else f"and {limit}={wanted}"
                raise InvalidRequestError(f"messages: the prompt has {before + len(ids)} tokens, {more}: {before + len(ids) + left} fit")
            parser = reply_parser(self._formats, tokenizer, prompt, np.asarray(ids, INT32).tobytes())
            form = chat_form(self._formats, tokenizer, form, prompt, parser)
            options = sampling(asked, self._generation, left if wanted is None else wanted, limit=limit)
            params = SamplingParams(**options, grammar=None if form is None else form.grammar)
        context: Context = ids if chunk is None else [chunk, ids]
        return Asked(fields=asked, prompt=prompt, context=context, num_prompt=before + len(ids), chunk=chunk, params=params, parser=parser)

    def _name(self, asked: Asked) -> str:
        return asked.fields.model or self.llm.model.name

    def _delta(self, asked: Asked, event: Event) -> dict[str, Any] | None:
        match event:
            case Content():
                return {"content": event.source}
            case Reasoning() if asked.fields.include_reasoning is not False:
                return {"reasoning_content": event.source, "reasoning": event.source}
            case CallBegins():
                function = {"name": event.name, "arguments": ""}
                return {"tool_calls": [{"index": event.index, "id": call_id(self._formats), "type": "function", "function": function}]}
            case ArgumentsDelta() if event.text:
                return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
        return None

    def _usage(self, asked: Asked, output: RequestOutput, thoughts: str) -> dict[str, Any]:
        tokenizer = self.llm.tokenizer
        assert tokenizer is not None
        counted = len(tokenizer.encode(thoughts, add_special_tokens=False)) if thoughts else 0
        told = usage(asked.num_prompt, len(output.token_ids), output.num_cached_tokens)
        return {**told, "completion_tokens_details": {"reasoning_tokens": counted}}

    async def _told(self, asked: Asked, output: RequestOutput) -> dict[str, Any]:
        """The field `nanovllm` of the answer, after the chunk that was asked for is kept; empty if there is nothing to say."""
        told: dict[str, Any] = {} if asked.chunk is None else {"exact": asked.chunk.provenance.exact}
        if output.out_of_pages:
            told["cut_short"] = {"choices": [0], "message": "chunks left no page of KV memory for the rest: release some, and ask again"}
        if (name := asked.fields.keep) is not None:
            try:
                kept = await self._kept.keep(name, asked.chunk, output, thinking=bool(asked.fields.keep_thinking))
                told["kept"] = {"name": name, "tokens": len(kept), "exact": kept.provenance.exact}
            except NanoVLLMError as error:
                told["keep_error"] = str(error)
        return {"nanovllm": told} if told else {}


def _head(kind: str, model: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{unique()}", "object": kind, "created": int(time.time()), "model": model}


def _event(head: dict[str, Any], delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]}


def _reason(asked: Asked, output: RequestOutput, *, called: bool) -> str:
    """OpenAI's word for the end, as the server has it."""
    return "tool_calls" if called and output.finish_reason == "stop" and not asked.prompt.tool_choice.single else output.finish_reason


@contextmanager
def _typed() -> Iterator[None]:
    """Errors of the server's functions as errors of the library."""
    try:
        yield
    except ApiError as error:
        raise InvalidRequestError(error.message) from None
