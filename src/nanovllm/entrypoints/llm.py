"""`LLM`: an object for programs that only need text. It holds the only mutable variable of the package, `LLM.state`."""

import os
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq
from contextlib import nullcontext, suppress
from typing import Any, Literal

import torch
from immutables import Map

from nanovllm.chunks.offload import relieved, with_room_for
from nanovllm.chunks.score import Continuation, score
from nanovllm.engine.disk_flush import flush_kv
from nanovllm.engine.donation import enter
from nanovllm.engine.failures import request_error
from nanovllm.engine.init_state import init_state
from nanovllm.engine.prompt import Context, is_ids
from nanovllm.engine.requests import cancel, new_sequence, submit_many
from nanovllm.engine.step import step
from nanovllm.entrypoints.display.terminal import bar
from nanovllm.entrypoints.process import uninterrupted
from nanovllm.entrypoints.ranks.leader import start
from nanovllm.entrypoints.ranks.settings import chosen_devices, require_timeout, settings_of
from nanovllm.entrypoints.stream import Piece, Stream
from nanovllm.errors import (
    DonatedStateError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    OutOfPagesError,
    RequestFailedError,
)
from nanovllm.executor.executor import runtime_of
from nanovllm.loading.load_model import load_model
from nanovllm.models.model import Model
from nanovllm.sampling.keywords import explain_unknown_keywords
from nanovllm.sampling.params import SamplingParams, from_generation_config
from nanovllm.sampling.process_logits import LogitsProcessor, as_processor
from nanovllm.state.engine_state import EngineState
from nanovllm.state.logprobs import Score, TokenLogprobs, last_entries
from nanovllm.state.request import RequestOutput, Sequence
from nanovllm.state.steady import Steady
from nanovllm.tokenizer.messages import render
from nanovllm.tokenizer.stream import TextStream
from nanovllm.tokenizer.tokenizer import Tokenizer


class LLM:
    """One model and one engine, to be used from one thread.

    Functional calls work too: `llm.state, chunk = nv.prefill(llm.model, llm.state, ...)`.

    Chunks that nobody reads make room for requests in an engine with `host_kv_gib`: they are moved to host memory, the oldest first.

    Attributes:
        model: The model.
        pinned: The `liveness` of chunks that stay on the device.

    Examples:
        >>> llm = nv.LLM("tiny", device="cpu", num_pages=64)
        >>> llm.generate("Hello", nv.SamplingParams(temperature=0, max_tokens=12))[0].text
        '! How can I help you?'
    """

    __slots__ = ("_closed", "_dropped", "_inbox", "_state", "model", "pinned")

    @explain_unknown_keywords
    def __init__(
        self,
        model: str | os.PathLike[str] | Model,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        num_pages: int | None = None,
        num_frames: int | None = None,
        page_size: int = 16,
        memory_fraction: float = 0.9,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        max_step_ms: int | float | None = None,
        max_prefill_tokens: int | None = None,
        seed: int = 0,
        compile: bool | None = None,
        cascade: bool | None = None,
        check: bool | None = None,
        tuning: bool | str | os.PathLike[str] | None = None,
        revision: str | None = None,
        download: bool = False,
        trust_remote_code: bool = False,
        quantization: Literal["fp8", "int8", "int4"] | None = None,
        quantize_head: bool = False,
        fp8_activations: bool = False,
        kv_dtype: Literal["fp8"] | None = None,
        host_kv_gib: int | float | Literal["auto"] = 0,
        kv_dir: str | os.PathLike[str] | None = None,
        kv_dir_gib: int | float = 16,
        tensor_parallel_size: int = 1,
        devices: Seq[torch.device | str] | None = None,
        rank_timeout: int | float = 60.0,
    ) -> None:
        """Load a model and create its engine.

        Args:
            model: A folder, a repository or `"tiny"`, as `load_model` takes them, or a `Model`, which keeps its device and dtype.
            device: A torch device, such as `"cpu"` or `"cuda:0"`. None: the current CUDA GPU if torch sees one, else the CPU.
            dtype: Float32, bfloat16, float16 or float64, as a torch dtype or by name. None: the checkpoint's dtype on a GPU, float32
                on a CPU.
            num_pages: KV memory in pages of `page_size` tokens. None: as much as `init_state` chooses.
            num_frames: For models with some sliding-window layers: the number of pages with KV in those layers.
            page_size: Tokens per page.
            memory_fraction: The fraction of a GPU's memory that may be used.
            max_model_len: The maximum number of tokens of a prompt and its reply together. None: the model's own limit.
            max_num_seqs: The maximum number of requests that run at the same time.
            max_num_batched_tokens: The maximum number of tokens of one step. None: 8,192, or 16,896 on a GPU of 64 GiB or more.
            max_step_ms: About how many milliseconds a step may take while replies go on, as in `init_state`. None: no bound.
            max_prefill_tokens: The maximum number of prompt tokens in a step in which replies go on. None: no bound.
            seed: The seed of requests that have none of their own.
            compile: Whether decode steps use fused kernels and CUDA graphs, or `torch.compile`. None: on a GPU; on a CPU they run in C.
            cascade: Whether pages that requests share are read once for all of them. None: if that is faster.
            check: Whether to compare the fast kernels with the plain layers on the model's own weights at the start. None: on a GPU, once
                for the same weights.
            tuning: The tile configurations of the GPU's kernels. None: those of `nanovllm tune` for this GPU and model, or
                else those that nanovllm ships for them, if there is a file.
            revision: A branch, a tag or a commit of a repository. None: `main`.
            download: Whether to fetch from the Hugging Face Hub the files that the cache lacks.
            trust_remote_code: Whether Python code in the checkpoint may be executed.
            quantization: `"fp8"`, `"int8"` or `"int4"`: matrices are rounded while they are loaded, as in `load_model`. None: they are not.
            quantize_head: Whether the output matrix is rounded, too.
            fp8_activations: Whether steps of many tokens with FP8 weights round activations, too, as in `load_model`: faster, less exact.
            kv_dtype: `"fp8"`: keys and values as codes of 8 bits, with a scale for each token and head. None: the model's dtype.
            host_kv_gib: GiB of host memory for KV whose pages are needed for other requests, as in `init_state`. 0: none.
            kv_dir: A folder for KV that outlives the engine, as in `init_state`; `close` writes to it what is not there yet. None: none.
            kv_dir_gib: The size limit of the pages in `kv_dir`, in GiB.
            tensor_parallel_size: The number of ranks that run the model together, each on a GPU of its own. The others are processes that
                this one starts. They end with `close`, with the object and its states, or with the program.
            devices: The device of each rank. None: the first GPUs that torch sees, or the CPU for all if `device` is the CPU.
            rank_timeout: Seconds after which a rank that does not answer counts as dead.

        Raises:
            CheckpointError: The model cannot be loaded.
            InvalidRequestError: An option is invalid.
            EngineDeadError: A rank could not start, or has ended.
            OutOfPagesError: The KV memory does not fit into the device.
            TuningFileError: A tuning file was requested and cannot be used.

        Examples:
            >>> nv.LLM(model, num_pages=64, max_model_len=512).state.config.max_model_len
            512
        """
        where: dict[str, Any] = {"revision": revision, "download": download, "trust_remote_code": trust_remote_code}
        where |= {"quantization": quantization, "quantize_head": quantize_head, "fp8_activations": fp8_activations}
        limits: dict[str, Any] = {
            "num_pages": num_pages,
            "num_frames": num_frames,
            "page_size": page_size,
            "memory_fraction": memory_fraction,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_step_ms": max_step_ms,
            "max_prefill_tokens": max_prefill_tokens,
            "seed": seed,
            "compile": compile,
            "cascade": cascade,
            "check": check,
            "tuning": tuning,
            "kv_dtype": kv_dtype,
            "host_kv_gib": host_kv_gib,
            "kv_dir": kv_dir,
            "kv_dir_gib": kv_dir_gib,
        }
        if isinstance(model, Model) and any(value not in (None, False) for value in (device, dtype, *where.values())):
            raise InvalidRequestError(f"model is already loaded: pass device, dtype, {', '.join(where)} to load_model")
        # Requests whose call is over, each with its engine. The garbage collector may close an iterator in the middle of another call.
        self._dropped = deque[tuple[str, int]]()
        self._inbox: Map[int, RequestOutput | None] = Map()
        self.pinned = set[int]()
        self._closed = False
        self.model: Model
        self._state: EngineState
        require_timeout(rank_timeout)
        ranks = chosen_devices(tensor_parallel_size, model.device if isinstance(model, Model) else device, devices)
        if len(ranks) > 1:
            loading = {"dtype": dtype, "max_model_len": max_model_len, **where}
            self.model, self._state = start(settings_of(model, ranks, loading, limits, rank_timeout))
        else:
            if not isinstance(model, Model):
                place = device if devices is None else devices[0]
                model = load_model(model, place, dtype, max_model_len=max_model_len, **where)
            self.model = model
            self._state = init_state(self.model, **limits)

    @staticmethod
    def around(model: Model, state: EngineState) -> "LLM":
        """An `LLM` over an engine that was made before. Its state belongs to the `LLM` from now on.

        Args:
            model: The model.
            state: The newest state of the engine.

        Returns:
            The `LLM`.

        Examples:
            >>> nv.LLM.around(model, state).generate("Hello", nv.SamplingParams(temperature=0, max_tokens=4))[0].text
            '! How can I'
        """
        llm = LLM.__new__(LLM)
        llm.model, llm._state, llm._dropped, llm._inbox, llm.pinned = model, state, deque[tuple[str, int]](), Map(), set[int]()
        llm._closed = False
        return llm

    def __repr__(self) -> str:
        return f"LLM({self.model!r}, {self._state!r})"

    def close(self) -> None:
        """Write KV that is not on disk yet to `kv_dir`, if the engine has one, and end its other ranks, if it has some.

        Further requests raise `EngineClosedError`. Functional calls with `state` go on if there were no other ranks, but their KV is not
        written. Leaving a `with` block closes too.

        Raises:
            DonatedStateError: The state that is to be written was donated. The other ranks are ended all the same.

        Examples:
            >>> with nv.LLM(model, num_pages=64) as llm:
            ...     llm.generate("Hello", nv.SamplingParams(temperature=0, max_tokens=12))[0].text
            '! How can I help you?'
        """
        self._closed, runtime = True, runtime_of(self._state)
        try:
            if runtime.disk is not None:
                with suppress(EngineDeadError):  # then its KV is lost
                    flush_kv(self._state)
        finally:
            if runtime.mirror is not None:
                runtime.mirror.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with nullcontext() if kind is None else suppress(DonatedStateError):  # which would hide the exception of the block
            self.close()

    @property
    def state(self) -> EngineState:
        """The engine's state. Every call donates it and replaces it.

        Requests whose stream was dropped are cancelled when it is read.

        Examples:
            >>> llm = nv.LLM(model, num_pages=64)
            >>> llm.state, chunk = nv.prefill(llm.model, llm.state, "Once upon a time")
            >>> llm.state
            EngineState(1 of 64 pages used, 1 chunk, 0 requests, epoch 1)
        """
        self._cancel_dropped()
        return self._state

    @state.setter
    def state(self, state: EngineState) -> None:
        self._state = state

    @property
    def inbox(self) -> Map[int, RequestOutput | None]:
        """Requests for which a call of this object waits, with their outputs once they have ended.

        A step of one call may end a request of another, which then finds its output here. The map is persistent, and is replaced together
        with `state`.

        Examples:
            >>> llm = nv.LLM(model, num_pages=64)
            >>> stream = llm.stream("Once upon a time", nv.SamplingParams(temperature=0, max_tokens=5))
            >>> next(stream).text, dict(llm.inbox)
            (',', {0: None})
        """
        self._cancel_dropped()
        return self._inbox

    @inbox.setter
    def inbox(self, inbox: Map[int, RequestOutput | None]) -> None:
        self._inbox = inbox

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, or None."""
        return self.model.tokenizer

    @explain_unknown_keywords
    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | list[SamplingParams | None] | tuple[SamplingParams | None, ...] | None = None,
        *,
        priority: int | list[int] | tuple[int, ...] = 0,
        process_logits: LogitsProcessor | Callable[..., Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate replies to one prompt or to a list of prompts, as a batch.

        A progress bar is drawn on a terminal. If the call is interrupted, by Ctrl-C too, its requests are cancelled.

        Args:
            prompts: A text, token ids or a chunk; or a list of prompts. In a list, a prompt may also be a list of parts.
            sampling_params: Options for all prompts, or a list with one per prompt. None: the model's `generation_config`.
            priority: The priority of all prompts, or a list with one per prompt, as in `submit`.
            process_logits: A function between the logits and the sample of all prompts, as in `submit`. To mix the rows of several prompts,
                use `nv.generate_many`.

        Returns:
            One output per prompt, in the same order. A request that fails has `finish_reason` `"error"`, an `error`, and the text until
            then. The others are whole.

        Raises:
            InvalidRequestError: A prompt or an option is invalid; nothing is queued.
            EngineClosedError: The `LLM` was closed.
            EngineDeadError: The device is broken.
            DonatedStateError: `self.state` was donated to a call whose result was not assigned to it.
            ReleasedChunkError: A chunk in a prompt was released.
            ForeignChunkError: A chunk in a prompt belongs to another engine.

        Examples:
            >>> llm = nv.LLM(model, num_pages=64)
            >>> greedy = nv.SamplingParams(temperature=0, max_tokens=8, stop=".")
            >>> outputs = llm.generate(["The cat", "Once upon a time"], greedy)
            >>> [out.text for out in outputs]
            [' is the national animal of Poner', ', a boy named Jonas lived in a']
        """
        contexts, params = with_params(prompts, sampling_params)
        priorities = one_each(priority, len(contexts))
        ids: list[int] = []
        try:
            with uninterrupted():
                ids = self._submit(contexts, params, priorities, as_processor(process_logits))
            with bar(len(ids), "generate", "reply") as shown:
                waited = set(ids)
                while waited:
                    ended = self._step() & waited
                    waited -= ended
                    shown.update(len(ended))
                    self._require_known(waited)
            if (mirror := runtime_of(self.state).mirror) is not None:
                mirror.compare(self.state)
            return [output for i in ids if (output := self.inbox[i]) is not None]
        finally:
            self._drop(self._state.runtime.lease.engine, ids)
            self._cancel_dropped()

    @explain_unknown_keywords
    def stream(
        self,
        prompt: Context,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        process_logits: LogitsProcessor | Callable[..., Any] | None = None,
    ) -> Stream:
        """Generate the reply to one prompt piece by piece.

        Streams and calls of `generate` may be interleaved. The request is queued when the first piece is read. It is cancelled when the
        iterator is closed: by `close()`, or because nothing refers to it any more. So leaving the loop `for piece in llm.stream(...)`
        cancels it, but an iterator that has a name goes on until it is closed.

        Args:
            prompt: One prompt: a text, token ids, a chunk, or a list of these in which only the first part may be a chunk. A list of
                texts is one prompt in parts here, and several prompts in `generate`.
            sampling_params: The options. None: the model's `generation_config`.
            priority: Its priority, as in `submit`.
            process_logits: A function between the logits and the sample, as in `submit`.

        Returns:
            An iterator of pieces. Their texts together are the text that `generate` returns. In a notebook it shows the reply as it grows.

        Raises:
            InvalidRequestError: The prompt or an option is invalid; raised at once.
            OutOfPagesError: Live chunks leave the request without pages, or the device has no memory for it; raised while reading.
            RequestFailedError: `process_logits` fails, or the reply cannot be decoded; raised while reading. Other requests go on.
            EngineClosedError: The `LLM` was closed.
            EngineDeadError: The device is broken.
            DonatedStateError: `self.state` was donated to a call whose result was not assigned to it.
            ReleasedChunkError: A chunk in the prompt was released.
            ForeignChunkError: A chunk in the prompt belongs to another engine.

        Examples:
            >>> llm = nv.LLM(model, num_pages=64)
            >>> [piece.text for piece in llm.stream("Once upon a time", nv.SamplingParams(temperature=0, max_tokens=5))]
            [',', ' a', ' boy', ' named', ' Jonas']
        """
        self._require_open()
        new_sequence(self.model, enter(self.state), prompt, sampling_params, priority=priority)  # only raises errors; nothing is committed
        params = from_generation_config(self.model.generation_config) if sampling_params is None else sampling_params
        return Stream(self._pieces(prompt, params, priority, as_processor(process_logits)))

    @explain_unknown_keywords
    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | None = None,
        *,
        tools: Any = None,
        enable_thinking: bool = True,
        priority: int = 0,
        process_logits: LogitsProcessor | Callable[..., Any] | None = None,
    ) -> RequestOutput:
        """Generate the reply to a conversation.

        The model's chat template makes the prompt. Earlier messages are found in the prefix index and do not run again.

        Args:
            messages: A list of `{"role": "system" | "user" | "assistant" | "tool", "content": text}`. The assistant's messages may have
                `tool_calls`, whose arguments are objects. Other keys, such as `tool_call_id`, go to the chat template unchanged.
            sampling_params: The options. None: the model's `generation_config`.
            tools: Definitions of tools that the chat template shows to the model, such as `{"type": "function", "function": {"name": "now",
                "description": "The time.", "parameters": {"type": "object", "properties": {}}}}`. The reply is text: calls in it are in the
                model's own format.
            enable_thinking: False asks the chat template for a reply without a think block.
            priority: Its priority, as in `submit`.
            process_logits: A function between the logits and the sample, as in `submit`.

        Returns:
            The output.

        Raises:
            InvalidRequestError: A message is invalid, the model has no usable chat template, or the prompt is too long.
            OutOfPagesError: Live chunks leave the request without pages, or the device has no memory for it.
            RequestFailedError: `process_logits` fails, or the reply cannot be decoded.
            EngineClosedError: The `LLM` was closed.
            EngineDeadError: The device is broken.
            DonatedStateError: `self.state` was donated to a call whose result was not assigned to it.

        Examples:
            >>> llm = nv.LLM(model, num_pages=64)
            >>> messages = [{"role": "user", "content": "Hello"}]
            >>> greedy = nv.SamplingParams(temperature=0, max_tokens=12)
            >>> llm.chat(messages, greedy, enable_thinking=False).text
            'Hello! How can I help you?'
        """
        tokens = self.chat_tokens(messages, tools=tools, enable_thinking=enable_thinking)
        (output,) = self.generate([tokens], sampling_params, priority=priority, process_logits=process_logits)
        return whole(output)

    @explain_unknown_keywords
    def score(self, contexts: list[Context], continuations: list[Continuation], *, top_logprobs: int = 0) -> list[Score]:
        """Compute the log-probabilities of given continuations, each after its context.

        For all tokens of a prompt but the first, pass its first token as the context and the others as the continuation.

        Args:
            contexts: As in `nv.score`.
            continuations: As in `nv.score`.
            top_logprobs: How many of the most probable tokens to report in the place of each token, up to 20.

        Returns:
            One score per continuation, in the same order.

        Raises:
            InvalidRequestError: An argument is invalid, or a context with its continuation is too long for the engine.
            OutOfPagesError: Too few pages are available for a context with one of its continuations.
            EngineClosedError: The `LLM` was closed.
            EngineDeadError: The device is broken.
            DonatedStateError: `self.state` was donated to a call whose result was not assigned to it.
            ReleasedChunkError: A chunk in a context was released.
            ForeignChunkError: A chunk in a context belongs to another engine.

        Examples:
            >>> llm = nv.LLM(model, num_pages=64)
            >>> ids = model.tokenizer.encode("Once upon a time")
            >>> (prompt,) = llm.score([ids[:1]], [ids[1:]], top_logprobs=2)
            >>> [model.tokenizer.decode([entry.token_id]) for entry in prompt.entries], len(prompt.entries[0].top)
            ([' upon', ' a', ' time'], 2)
        """
        self._require_open()
        with uninterrupted():
            self.state, scores = score(self.model, self.state, contexts, continuations, top_logprobs=top_logprobs)
        return scores

    @explain_unknown_keywords
    def chat_tokens(self, messages: Any, *, tools: Any = None, enable_thinking: bool = True) -> list[int]:
        """The token ids of a conversation's prompt, for `stream` and the functional calls.

        Args:
            messages: As in `chat`.
            tools: As in `chat`.
            enable_thinking: As in `chat`.

        Returns:
            The token ids.

        Raises:
            InvalidRequestError: A message is invalid, the model has no usable chat template, or the conversation is too long for it.

        Examples:
            >>> llm = nv.LLM(model, num_pages=64)
            >>> tokens = llm.chat_tokens([{"role": "user", "content": "Hello"}])
            >>> print(model.tokenizer.decode(tokens, skip_special_tokens=False))
            <|im_start|>user
            Hello<|im_end|>
            <|im_start|>assistant
            <BLANKLINE>
        """
        most = self.model.config.max_position_embeddings
        return render(self.model.tokenizer, messages, tools=tools, enable_thinking=enable_thinking, most=most)

    def _pieces(
        self, prompt: Context, params: SamplingParams, priority: int, processor: LogitsProcessor | None
    ) -> Generator[Piece, None, None]:
        """The pieces of a reply, read from the state, so that steps of other calls count too."""
        ids: list[int] = []
        text, seen = TextStream.of(self.tokenizer, params.stop, params.skip_special_tokens), 0
        engine = self.state.runtime.lease.engine
        try:
            with uninterrupted():
                ids = self._submit([prompt], [params], [priority], processor)
            while True:
                output = self.inbox.get(ids[0])
                if output is not None:
                    yield last_piece(text, seen, whole(output))
                    return
                if token_ids := self._drawn(ids[0], seen):
                    seen += len(token_ids)
                    text, piece = pushed(text, token_ids, ids[0])
                    logprobs = None if params.logprobs is None else self._logprobs(ids[0], token_ids)
                    yield Piece(text=piece, token_ids=token_ids, logprobs=logprobs)
                else:
                    self._step()
        finally:
            self._drop(engine, ids)  # nothing else: a call that is under way may be interrupted by this

    def _submit(
        self, contexts: list[Context], params: list[SamplingParams | None], priorities: list[int], processor: LogitsProcessor | None
    ) -> list[int]:
        """Queue requests and enter them in the inbox."""
        self._require_open()
        more: dict[str, Any] = {"priorities": priorities, "process_logits": processor}
        try:
            self.state, ids = submit_many(self.model, self.state, contexts, params, **more)
        except OutOfPagesError:  # a chunk finds no room to come back from host memory
            self.state = with_room_for(self.state, contexts, self.pinned)
            self.state, ids = submit_many(self.model, self.state, contexts, params, **more)
        self.inbox = self.inbox.update(dict.fromkeys(ids))
        return ids

    def _step(self) -> set[int]:
        """Run one step for all requests; returns the ids of the requests that it ended."""
        self._require_open()
        with uninterrupted():
            self.state = relieved(self.state, self.pinned)
            self.state, outputs = step(self.model, self.state)
            ended = {out.request_id: out.output for out in outputs if out.output is not None}
            self.inbox = self.inbox.update({i: output for i, output in ended.items() if i in self.inbox})
        return set(ended)

    def _require_open(self) -> None:
        if self._closed:
            raise EngineClosedError("this LLM was closed: make a new one")

    def _drop(self, engine: str, ids: list[int]) -> None:
        self._dropped.extend([(engine, request_id) for request_id in ids])

    def _cancel_dropped(self) -> None:
        """Remove requests whose call is over from the inbox, and cancel those that have not ended.

        A state that was donated elsewhere cannot be changed. Then the requests stay dropped until a newer state is assigned. A state of
        another engine has other requests of the same numbers, which are left alone.
        """
        while self._dropped:
            with uninterrupted():
                engine, request_id = self._dropped[0]
                here, ended = engine == self._state.runtime.lease.engine, self._inbox.get(request_id) is not None
                try:
                    if here and not ended and sequence_of(self._state, request_id) is not None:
                        with suppress(EngineDeadError):  # which the call has raised
                            self._state = cancel(self._state, request_id)
                except DonatedStateError:
                    return
                if here and request_id in self._inbox:
                    self._inbox = self._inbox.delete(request_id)
                self._dropped.popleft()

    def _drawn(self, request_id: int, seen: int = 0) -> list[int]:
        """The tokens of a running request after the first `seen` of its reply, whichever call ran the steps.

        Raises:
            InvalidRequestError: The state does not have the request.
        """
        running = self.state.running
        if isinstance(running, Steady) and (row := _row(running, request_id)) is not None:
            return running.reply(row, seen)
        sequence = sequence_of(self.state, request_id)
        if sequence is None:
            raise InvalidRequestError(f"request {request_id} was cancelled, or ran its last step, outside of this LLM's calls")
        return sequence.tokens.array(sequence.request.num_prompt + seen).tolist()

    def _logprobs(self, request_id: int, token_ids: list[int]) -> tuple[TokenLogprobs, ...]:
        """The log-probabilities of a running request's last tokens, `token_ids`."""
        running = self.state.running
        if isinstance(running, Steady) and (row := _row(running, request_id)) is not None:
            return tuple(running.entries(row, token_ids))
        sequence = sequence_of(self.state, request_id)
        return tuple(last_entries(None if sequence is None else sequence.logprobs, token_ids))

    def _require_known(self, waited: set[int]) -> None:
        """Raise if requests are waited for but the engine has none."""
        if waited and not self.state.running and not self.state.waiting:
            self._drawn(min(waited))


def sequence_of(state: EngineState, request_id: int) -> Sequence | None:
    """The sequence of a request that waits or runs, or None."""
    if request_id in state.waiting.items:
        return state.waiting.items[request_id]
    row = _row(state.running, request_id)
    return None if row is None else state.running[row]


def _row(running: tuple[Sequence, ...] | Steady, request_id: int) -> int | None:
    """The row of a running request, or None. A search by halves first: without priorities the ids are in order."""
    if isinstance(running, Steady):
        row = bisect_left(running.ids, request_id)
        if running.ids[row : row + 1] == (request_id,):
            return row
        return running.ids.index(request_id) if request_id in running.ids else None
    row = bisect_left(running, request_id, key=lambda sequence: sequence.request.request_id)
    if row < len(running) and running[row].request.request_id == request_id:
        return row
    return next((row for row, sequence in enumerate(running) if sequence.request.request_id == request_id), None)


def pushed(text: TextStream, token_ids: list[int], request_id: int) -> tuple[TextStream, str]:
    """`text.push(token_ids)`, for a request.

    Raises:
        RequestFailedError: The tokens cannot be decoded.
    """
    try:
        return text.push(token_ids)
    except Exception as error:
        raise request_error(request_id, RequestFailedError, "its tokens cannot be decoded", error) from error


def last_piece(text: TextStream, num_seen: int, output: RequestOutput) -> Piece:
    """The piece that ends a reply of which `num_seen` tokens went into `text`."""
    return Piece(
        text=text.end(output.text),
        token_ids=output.token_ids[num_seen:],
        finish_reason=output.finish_reason,
        output=output,
        logprobs=None if output.logprobs is None else tuple(output.logprobs[num_seen:]),
    )


def with_params(prompts: Any, sampling_params: Any) -> tuple[list[Context], list[SamplingParams | None]]:
    """The prompts as a list, and the options of each.

    Raises:
        InvalidRequestError: There are several options, and not one per prompt.
    """
    contexts = as_batch(prompts)
    params = list(sampling_params) if isinstance(sampling_params, list | tuple) else [sampling_params] * len(contexts)
    if len(params) != len(contexts):
        raise InvalidRequestError(f"{len(contexts)} prompts and {len(params)} sampling_params: pass one for all, or one per prompt")
    return contexts, params


def one_each(priority: Any, count: int) -> list[int]:
    """The priority of each of `count` prompts.

    Raises:
        InvalidRequestError: There are several, and not one per prompt.
    """
    priorities = list(priority) if isinstance(priority, list | tuple) else [priority] * count
    if len(priorities) != count:
        raise InvalidRequestError(f"{count} prompts and {len(priorities)} priorities: pass one for all, or one per prompt")
    return priorities


def whole(output: RequestOutput) -> RequestOutput:
    """The output of a request. Raises its error if it failed."""
    if output.error is not None:
        raise output.error
    return output


def as_batch(prompts: Any) -> list[Context]:
    """The prompts as a list. A text, a chunk or a list of token ids is one prompt; every other list is a list of prompts."""
    if isinstance(prompts, list | tuple):
        return [prompts] if len(prompts) and is_ids(prompts) else list(prompts)
    return [prompts]
