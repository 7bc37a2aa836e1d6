"""`AsyncLLM`: an `LLM` for event loops. Its engine runs in a thread of its own."""

import asyncio
import os
import weakref
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any, Self, TypeVar

import torch

from nanovllm.chunks.score import Continuation, score
from nanovllm.engine.constrained import compile_grammar
from nanovllm.engine.prompt import Context, encode, parts_of
from nanovllm.entrypoints.calls import Call
from nanovllm.entrypoints.engine_thread import EngineThread
from nanovllm.entrypoints.llm import LLM, last_piece, one_each, pushed, whole, with_params
from nanovllm.entrypoints.ranks.settings import chosen_devices
from nanovllm.entrypoints.stream import Piece
from nanovllm.errors import InvalidRequestError, NanoVLLMError
from nanovllm.models.model import Model
from nanovllm.sampling.grammar import Grammar
from nanovllm.sampling.keywords import explain_unknown_keywords
from nanovllm.sampling.params import SamplingParams, from_generation_config
from nanovllm.sampling.process_logits import LogitsProcessor, as_processor
from nanovllm.state.engine_state import EngineState
from nanovllm.state.logprobs import Score
from nanovllm.state.request import RequestOutput
from nanovllm.tokenizer.messages import render
from nanovllm.tokenizer.stream import TextStream
from nanovllm.tokenizer.tokenizer import Tokenizer

T = TypeVar("T")
STEP_MS = 25.0  # the default of `max_step_ms` on a GPU
SHORT = 4096  # characters that are encoded in the event loop's own thread


class AsyncLLM:
    """One model and one engine for the tasks of event loops.

    Prompts, options, replies and errors are those of `LLM`. The engine runs in a thread of its own, which ends with `close`, with the
    object, or with the program. All methods may be called from any event loop in any thread.

    A task that is cancelled, by `asyncio.timeout` too, cancels its requests before the next step. So does leaving an iterator of `stream`.

    Examples:
        >>> import asyncio
        >>> greedy = nv.SamplingParams(temperature=0, max_tokens=8, stop=".")
        >>> async def main():
        ...     async with nv.AsyncLLM("tiny", device="cpu", num_pages=64) as llm:
        ...         replies = await asyncio.gather(llm.generate("The cat", greedy), llm.generate("Once upon a time", greedy))
        ...     return [output.text for (output,) in replies]
        >>> asyncio.run(main())
        [' is the national animal of Poner', ', a boy named Jonas lived in a']
    """

    __slots__ = ("__weakref__", "_engine")

    @partial(explain_unknown_keywords, passed_to=LLM.__init__)
    def __init__(self, model: str | os.PathLike[str] | Model, *, max_num_waiting: int | None = None, **options: Any) -> None:
        """Load a model, create its engine and start the engine's thread. This blocks; no event loop is needed.

        Args:
            model: A folder, a repository or `"tiny"`, as `load_model` takes them, or a `Model`.
            max_num_waiting: How many requests may be in the engine beyond the `max_num_seqs` that run. Further ones raise `QueueFullError`.
                None: any number.
            **options: The other arguments of `LLM`. On a GPU `max_step_ms` is 25 unless you set it, or `max_prefill_tokens`. Infinity: no
                bound.

        Raises:
            CheckpointError: The model cannot be loaded.
            InvalidRequestError: An option is invalid.
            OutOfPagesError: The KV memory does not fit into the device.
            TuningFileError: A tuning file was requested and cannot be used.

        Examples:
            >>> nv.AsyncLLM(model, num_pages=64, max_num_seqs=8, max_num_waiting=32).state.config.max_num_seqs
            8
        """
        if max_num_waiting is not None and (
            isinstance(max_num_waiting, bool) or not isinstance(max_num_waiting, int) or max_num_waiting < 0
        ):
            raise InvalidRequestError(f"max_num_waiting={max_num_waiting!r} must be an integer of at least 0, or None")
        if options.get("max_step_ms") is None and options.get("max_prefill_tokens") is None:
            where = options.get("tensor_parallel_size", 1), options.get("device"), options.get("devices")
            device = model.device if isinstance(model, Model) else torch.device(chosen_devices(*where)[0])
            options["max_step_ms"] = STEP_MS if device.type == "cuda" else None
        if isinstance(model, Model) and model.config.mesh is not None:
            raise InvalidRequestError(
                "ranks take the requests of tasks in different orders: give the model's name and tensor_parallel_size"
            )
        llm = LLM(model, **options)
        self._engine = EngineThread(llm.model, llm.state, max_num_waiting)
        self._engine.start()
        weakref.finalize(self, self._engine.close).atexit = False  # the thread has an exit of its own, which waits for the last step

    def __repr__(self) -> str:
        return f"AsyncLLM({self.model!r}, {self.state!r})"

    @property
    def model(self) -> Model:
        """The model."""
        return self._engine.model

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, or None."""
        return self.model.tokenizer

    @property
    def state(self) -> EngineState:
        """The newest state, to read: how many requests run and wait, which pages are in use, `stats`. Calls that take it go to `apply`."""
        return self._engine.state

    @property
    def refusal(self) -> NanoVLLMError | None:
        """Why no request is taken any more, an `EngineClosedError` or an `EngineDeadError`; None while requests are taken."""
        return self._engine.refusal

    @explain_unknown_keywords
    async def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | list[SamplingParams | None] | tuple[SamplingParams | None, ...] | None = None,
        *,
        priority: int | list[int] | tuple[int, ...] = 0,
        process_logits: LogitsProcessor | Callable[..., Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate replies to one prompt or to a list of prompts, together with all other calls.

        The task wakes once, when all replies have ended.

        Args:
            prompts: As in `LLM.generate`.
            sampling_params: As in `LLM.generate`.
            priority: As in `LLM.generate`.
            process_logits: As in `LLM.generate`.

        Returns:
            One output per prompt, in the same order. A request that fails has `finish_reason` `"error"`, an `error`, and the text until
            then. The others are whole.

        Raises:
            InvalidRequestError: A prompt or an option is invalid; nothing is queued.
            QueueFullError: Too many requests wait; nothing is queued.
            ReleasedChunkError: A chunk in a prompt was released.
            ForeignChunkError: A chunk in a prompt belongs to another engine.
            EngineClosedError: The engine was closed, before the call or during it.
            EngineDeadError: The engine has failed.

        Examples:
            >>> async def main():
            ...     async with nv.AsyncLLM(model, num_pages=64) as llm:
            ...         return await llm.generate("Hello", nv.SamplingParams(temperature=0, max_tokens=12))
            >>> import asyncio
            >>> asyncio.run(main())[0].text
            '! How can I help you?'
        """
        contexts, params = with_params(prompts, sampling_params)
        call = await self._submit(contexts, params, one_each(priority, len(contexts)), process_logits)
        try:
            await call.news()
            return [call.results[i] for i in sorted(call.results)]
        finally:
            self._engine.cancel(call)

    @explain_unknown_keywords
    def stream(
        self,
        prompt: Context,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        process_logits: LogitsProcessor | Callable[..., Any] | None = None,
    ) -> AsyncGenerator[Piece, None]:
        """Generate the reply to one prompt piece by piece.

        The request is queued when the first piece is read, and errors are raised there. A reader that is slower than the engine gets all
        new text in one piece. The request is cancelled when the iterator is closed: by `aclose()`, because its task was cancelled while it
        waited for a piece, or because nothing refers to it any more, as after leaving the loop `async for piece in llm.stream(...)`.

        Args:
            prompt: As in `LLM.stream`.
            sampling_params: As in `LLM.stream`.
            priority: As in `LLM.stream`.
            process_logits: As in `LLM.stream`.

        Returns:
            An asynchronous iterator of pieces. Their texts together are the text that `generate` returns.

        Raises:
            InvalidRequestError: The prompt or an option is invalid.
            QueueFullError: Too many requests wait.
            OutOfPagesError: Live chunks leave the request without pages, or the device has no memory for it.
            RequestFailedError: `process_logits` fails, or the reply cannot be decoded. Other requests go on.
            ReleasedChunkError: A chunk in the prompt was released.
            ForeignChunkError: A chunk in the prompt belongs to another engine.
            EngineClosedError: The engine was closed, before the call or during it.
            EngineDeadError: The engine has failed.

        Examples:
            >>> async def main():
            ...     async with nv.AsyncLLM(model, num_pages=64) as llm:
            ...         async for piece in llm.stream("Hello", nv.SamplingParams(temperature=0, max_tokens=12)):
            ...             print(piece.text, end="|")
            >>> import asyncio
            >>> asyncio.run(main())  # doctest: +ELLIPSIS
            !...
        """
        return self._pieces(prompt, sampling_params, priority, process_logits)

    @explain_unknown_keywords
    async def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | None = None,
        *,
        tools: Any = None,
        enable_thinking: bool = True,
        priority: int = 0,
        process_logits: LogitsProcessor | Callable[..., Any] | None = None,
    ) -> RequestOutput:
        """Generate the reply to a conversation. To stream it, give the tokens of `chat_tokens` to `stream`.

        Args:
            messages: As in `LLM.chat`.
            sampling_params: As in `LLM.chat`.
            tools: As in `LLM.chat`.
            enable_thinking: As in `LLM.chat`.
            priority: As in `LLM.chat`.
            process_logits: As in `LLM.chat`.

        Returns:
            The output.

        Raises:
            InvalidRequestError: A message is invalid, the model has no usable chat template, or the prompt is too long.
            QueueFullError: Too many requests wait.
            OutOfPagesError: Live chunks leave the request without pages, or the device has no memory for it.
            RequestFailedError: `process_logits` fails, or the reply cannot be decoded.
            EngineClosedError: The engine was closed, before the call or during it.
            EngineDeadError: The engine has failed.

        Examples:
            >>> async def main():
            ...     greedy = nv.SamplingParams(temperature=0, max_tokens=12)
            ...     async with nv.AsyncLLM(model, num_pages=64) as llm:
            ...         return await llm.chat([{"role": "user", "content": "Hello"}], greedy, enable_thinking=False)
            >>> import asyncio
            >>> asyncio.run(main()).text
            'Hello! How can I help you?'
        """
        with self._engine.place_for(Call(1)):
            tokens = await self.chat_tokens(messages, tools=tools, enable_thinking=enable_thinking)
        (output,) = await self.generate([tokens], sampling_params, priority=priority, process_logits=process_logits)
        return whole(output)

    @explain_unknown_keywords
    async def score(self, contexts: list[Context], continuations: list[Continuation], *, top_logprobs: int = 0) -> list[Score]:
        """Compute the log-probabilities of given continuations, each after its context. All requests wait meanwhile, as for `apply`.

        Args:
            contexts: As in `LLM.score`.
            continuations: As in `LLM.score`.
            top_logprobs: As in `LLM.score`.

        Returns:
            One score per continuation, in the same order.

        Raises:
            InvalidRequestError: An argument is invalid, or a context with its continuation is too long for the engine.
            OutOfPagesError: Too few pages are available for a context with one of its continuations.
            ReleasedChunkError: A chunk in a context was released.
            ForeignChunkError: A chunk in a context belongs to another engine.
            EngineClosedError: The engine was closed.
            EngineDeadError: The engine has failed.

        Examples:
            >>> async def main():
            ...     async with nv.AsyncLLM(model, num_pages=64) as llm:
            ...         return await llm.score(["Once upon a time"], [", a boy"])
            >>> import asyncio
            >>> asyncio.run(main())[0].token_ids
            [11, 258, 1060]
        """
        scores = await self.apply(partial(score, contexts=contexts, continuations=continuations, top_logprobs=top_logprobs))
        return scores or []

    @explain_unknown_keywords
    async def chat_tokens(self, messages: Any, *, tools: Any = None, enable_thinking: bool = True) -> list[int]:
        """The token ids of a conversation's prompt. They are made in a thread of the loop's pool, because a template may take long.

        Args:
            messages: As in `LLM.chat`.
            tools: As in `LLM.chat`.
            enable_thinking: As in `LLM.chat`.

        Returns:
            The token ids.

        Raises:
            InvalidRequestError: A message is invalid, the model has no usable chat template, or the conversation is too long for it.

        Examples:
            >>> import asyncio
            >>> len(asyncio.run(nv.AsyncLLM(model, num_pages=64).chat_tokens([{"role": "user", "content": "Hello"}])))
            9
        """
        most = self.model.config.max_position_embeddings
        return await asyncio.to_thread(render, self.tokenizer, messages, tools=tools, enable_thinking=enable_thinking, most=most)

    async def apply(self, function: Callable[[Model, EngineState], EngineState | tuple[EngineState, T]]) -> T | None:
        """Call a function of the model and the state between two steps, in the engine's thread: for the functional interface.

        All requests wait meanwhile. The function must pass the state on, as every functional call does, and must not call `step`. If it
        makes several calls and a later one raises, the state of the earlier ones is lost, and the engine ends.

        A task that is cancelled while its function runs loses the result. To release such a result, for example a chunk, make a task of
        the call, wait with `asyncio.shield`, and release what the task returns.

        Args:
            function: Takes the model and the newest state. It returns the next state, or a pair of it and a result.

        Returns:
            The result, or None.

        Raises:
            InvalidRequestError: The function did not return the newest state.
            EngineClosedError: The engine was closed.
            EngineDeadError: The engine has failed, or the newest state was lost in the function.

        Examples:
            >>> async def main():
            ...     async with nv.AsyncLLM(model, num_pages=64) as llm:
            ...         facts = await llm.apply(lambda model, state: nv.prefill(model, state, "The king of Aistonia is Oswin."))
            ...         greedy = nv.SamplingParams(temperature=0, max_tokens=8, stop=".")
            ...         (output,) = await llm.generate([[facts, " The king of Aistonia is"]], greedy)
            ...         await llm.apply(lambda model, state: nv.release(state, facts))
            ...         return output.text
            >>> import asyncio
            >>> asyncio.run(main())
            ' Oswin'
        """
        call = Call(1)
        try:
            self._engine.apply(call, function)
            await call.news()
            return call.results[0]
        finally:
            self._engine.cancel(call)

    async def close(self, *, drain: bool = False) -> None:
        """Take no more requests, and end the engine's thread. Further calls of `close` do nothing, but they may end a drain.

        Leaving the block of `async with` closes without a drain.

        Args:
            drain: Whether requests that were queued before run to their end. Otherwise those who wait for them get `EngineClosedError`.

        Examples:
            >>> async def main():
            ...     llm = nv.AsyncLLM(model, num_pages=64)
            ...     reply = asyncio.create_task(llm.generate("Hello", nv.SamplingParams(temperature=0, max_tokens=12)))
            ...     await asyncio.sleep(0)  # the task begins
            ...     await llm.close(drain=True)
            ...     return (await reply)[0].text, llm.refusal
            >>> import asyncio
            >>> asyncio.run(main())
            ('! How can I help you?', EngineClosedError('this AsyncLLM was closed: make a new one'))
        """
        call = Call(1)
        self._engine.close(call, drain=drain)
        await call.news()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _submit(
        self, contexts: list[Context], params: list[SamplingParams | None], priorities: list[int], processor: Any, *, streamed: bool = False
    ) -> Call:
        """Queue requests, not in the engine's thread. A thread of the loop's pool encodes long texts, and compiles grammars."""
        call = Call(len(contexts), streamed=streamed)
        with self._engine.place_for(call):
            processor = as_processor(processor)
            texts = [part for context in contexts for part in parts_of(context) if isinstance(part, str)]
            if texts:
                if sum(map(len, texts)) <= SHORT:
                    contexts = _encoded(self.model, contexts)
                else:
                    contexts = await asyncio.to_thread(_encoded, self.model, contexts)
            if grammars := {p.grammar for p in params if isinstance(p, SamplingParams) and p.grammar is not None}:
                await asyncio.to_thread(_compile, self.model, grammars)
            self._engine.submit(call, contexts, params, processor, priorities)
        return call

    async def _pieces(
        self, prompt: Context, sampling_params: SamplingParams | None, priority: int, processor: Any
    ) -> AsyncGenerator[Piece, None]:
        call = await self._submit([prompt], [sampling_params], [priority], processor, streamed=True)
        text, seen = None, 0
        try:
            while True:
                await call.news()
                if text is None:
                    params = from_generation_config(self.model.generation_config) if sampling_params is None else sampling_params
                    text = TextStream.of(self.tokenizer, params.stop, params.skip_special_tokens)
                for output in call.results.values():
                    yield last_piece(text, seen, whole(output))
                    return
                token_ids, call.token_ids = call.token_ids, []
                logprobs, call.logprobs = call.logprobs, None
                seen += len(token_ids)
                text, piece = pushed(text, token_ids, call.ids[0])
                yield Piece(text=piece, token_ids=token_ids, logprobs=None if logprobs is None else tuple(logprobs))
        finally:
            self._engine.cancel(call)


def _compile(model: Model, grammars: set[Grammar]) -> None:
    for grammar in grammars:
        compile_grammar(model, grammar)


def _encoded(model: Model, contexts: list[Context]) -> list[Context]:
    """The contexts with token ids in place of their texts. One that cannot be encoded stays as it is: `submit_many` will say why."""
    encoded: list[Context] = []
    for context in contexts:
        parts, total, most = [], 0, model.config.max_position_embeddings
        try:
            for part in parts_of(context):
                parts.append(encode(model, part, first=total == 0, most=max(0, most - total)) if isinstance(part, str) else part)
                total += len(parts[-1])
            encoded.append(parts if len(parts) > 1 else parts[0])
        except (InvalidRequestError, TypeError):
            encoded.append(context)
    return encoded
