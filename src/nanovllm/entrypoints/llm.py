"""`LLM`: the shell for those who just want text. It holds the one mutable variable of the package, `LLM.state`."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from immutables import Map

from nanovllm.engine.donation import enter
from nanovllm.engine.init_state import init_state
from nanovllm.engine.prompt import Context, is_ids
from nanovllm.engine.requests import cancel, new_sequence, submit_many
from nanovllm.engine.step import step
from nanovllm.entrypoints.display.terminal import bar
from nanovllm.entrypoints.process import uninterrupted
from nanovllm.errors import InvalidRequestError
from nanovllm.loading.load_model import load_model
from nanovllm.models.model import Model
from nanovllm.sampling.keywords import explain_unknown_keywords
from nanovllm.sampling.params import SamplingParams, from_generation_config
from nanovllm.state.engine_state import EngineState
from nanovllm.state.request import RequestOutput
from nanovllm.tokenizer.messages import render
from nanovllm.tokenizer.stream import TextStream
from nanovllm.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """A part of a streamed reply. `text` may be empty while a character, or what could be a stop string, is not whole yet.

    The last piece has a `finish_reason` and, as `output`, what `generate` would have returned.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    output: RequestOutput | None = None


class LLM:
    """One model and one engine, used from one thread.

    `state` is the engine's state, which each call donates and replaces; `llm.state, chunk = nv.prefill(llm.model, llm.state, ...)` works
    as well. `inbox` has the requests that a call of this shell waits for, with their outputs once they have ended: whichever call runs
    the step in which a request ends, the one that asked finds it there. It is a persistent map, replaced together with `state`.
    """

    __slots__ = ("inbox", "model", "state")

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
        seed: int = 0,
        compile: bool | None = None,
        cascade: bool | None = None,
        check: bool | None = None,
        tuning: bool | str | os.PathLike[str] | None = None,
        revision: str | None = None,
        download: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        """Load a model and make an engine for it.

        All options but `model` are those of `load_model` and `init_state`.

        Args:
            model: A `Model`, or a folder, repository or `"tiny"` as `load_model` takes them. A `Model` keeps its device and dtype.

        Raises:
            CheckpointError: The model cannot be loaded.
            InvalidRequestError: An option makes no sense here.
            OutOfPagesError: The KV memory does not fit into the device.
            TuningFileError: A tuning file was asked for and cannot be used.
        """
        if isinstance(model, Model) and (device, dtype, revision, download, trust_remote_code) != (None, None, None, False, False):
            raise InvalidRequestError("a loaded model has its device, dtype, revision and code; give those to load_model")
        where: dict[str, Any] = {"revision": revision, "download": download, "trust_remote_code": trust_remote_code}
        if not isinstance(model, Model):
            model = load_model(model, device, dtype, max_model_len=max_model_len, **where)
        self.model: Model = model
        self.state: EngineState = init_state(
            self.model,
            num_pages=num_pages,
            num_frames=num_frames,
            page_size=page_size,
            memory_fraction=memory_fraction,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            seed=seed,
            compile=compile,
            cascade=cascade,
            check=check,
            tuning=tuning,
        )
        self.inbox: Map[int, RequestOutput | None] = Map()

    def __repr__(self) -> str:
        return f"LLM({self.model!r}, {self.state!r})"

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer."""
        return self.model.tokenizer

    @explain_unknown_keywords
    def generate(
        self, prompts: Any, sampling_params: SamplingParams | list[SamplingParams | None] | tuple[SamplingParams | None, ...] | None = None
    ) -> list[RequestOutput]:
        """Replies to one prompt (a text, token ids or a chunk) or to a list of prompts, batched, in the order of the prompts.

        `sampling_params` is one for all or a list of one each; None takes the model's `generation_config`. A bar shows on a terminal.
        Raises `InvalidRequestError` for what can never be served, before anything is queued. Whatever else interrupts the call, Ctrl-C
        included, takes its requests out of the engine.
        """
        contexts = as_batch(prompts)
        params = list(sampling_params) if isinstance(sampling_params, list | tuple) else [sampling_params] * len(contexts)
        if len(params) != len(contexts):
            raise InvalidRequestError(f"{len(contexts)} prompts and {len(params)} sampling_params: give one for all or one for each")
        ids: list[int] = []
        try:
            with uninterrupted():
                ids = self._submit(contexts, params)
            with bar(len(ids), "generate", "reply") as shown:
                waited = set(ids)
                while waited:
                    ended = self._step() & waited
                    waited -= ended
                    shown.update(len(ended))
                    self._require_known(waited)
            return [output for i in ids if (output := self.inbox[i]) is not None]
        finally:
            self._forget(ids)

    @explain_unknown_keywords
    def stream(self, prompt: Context, sampling_params: SamplingParams | None = None) -> Iterator[Piece]:
        """The reply to one prompt, token by token; the texts of the pieces together are the text that `generate` returns.

        Several streams and `generate` may be interleaved. The request is queued when the first piece is asked for. Closing the iterator,
        or leaving its loop by an exception, cancels the request. Raises `InvalidRequestError` at once for what can never be served.
        """
        new_sequence(self.model, enter(self.state), prompt, sampling_params)  # for its errors alone: nothing is committed
        params = from_generation_config(self.model.generation_config) if sampling_params is None else sampling_params
        return self._pieces(prompt, params)

    @explain_unknown_keywords
    def chat(self, messages: Any, sampling_params: SamplingParams | None = None, *, enable_thinking: bool = True) -> RequestOutput:
        """The reply to a conversation, a list of `{"role": "system" | "user" | "assistant", "content": text}`.

        The prompt is made by the model's own chat template. `enable_thinking=False` asks it for a reply without a think block. Earlier
        turns are found in the prefix index and not run again. Raises as `generate` and `messages.render` do.
        """
        return self.generate([self.chat_tokens(messages, enable_thinking=enable_thinking)], sampling_params)[0]

    @explain_unknown_keywords
    def chat_tokens(self, messages: Any, *, enable_thinking: bool = True) -> list[int]:
        """The token ids of a conversation's prompt, for `stream` and the functional interface; see `messages.render`."""
        return render(self.model.tokenizer, messages, enable_thinking=enable_thinking)

    def _pieces(self, prompt: Context, params: SamplingParams) -> Iterator[Piece]:
        ids: list[int] = []
        text, seen = TextStream.of(self.tokenizer, params.stop), 0
        try:
            with uninterrupted():
                ids = self._submit([prompt], [params])
            while True:
                output = self.inbox.get(ids[0])
                if output is not None:
                    yield Piece(
                        text=text.end(output.text), token_ids=output.token_ids[seen:], finish_reason=output.finish_reason, output=output
                    )
                    return
                if token_ids := self._drawn(ids[0], seen):
                    seen += len(token_ids)
                    text, piece = text.push(token_ids)
                    yield Piece(text=piece, token_ids=token_ids)
                else:
                    self._step()
        finally:
            self._forget(ids)

    def _submit(self, contexts: list[Context], params: list[SamplingParams | None]) -> list[int]:
        self.state, ids = submit_many(self.model, self.state, contexts, params)
        self.inbox = self.inbox.update(dict.fromkeys(ids))
        return ids

    def _step(self) -> set[int]:
        """One step of all that is queued: the ids of the requests that it ended."""
        with uninterrupted():
            self.state, outputs = step(self.model, self.state)
            ended = {out.request_id: out.output for out in outputs if out.output is not None}
            self.inbox = self.inbox.update({i: output for i, output in ended.items() if i in self.inbox})
        return set(ended)

    def _forget(self, ids: list[int]) -> None:
        """Take requests out of the inbox, and out of the engine where they have not ended."""
        with uninterrupted():
            queued = {s.request.request_id for s in self.state.running} | set(self.state.waiting.items)
            inbox = self.inbox.mutate()
            for i in ids:
                inbox.pop(i, None)
                if i in queued:
                    self.state = cancel(self.state, i)
            self.inbox = inbox.finish()

    def _drawn(self, request_id: int, seen: int = 0) -> list[int]:
        """The tokens that a request under way has drawn so far behind the first `seen`, whoever called the steps."""
        waiting = self.state.waiting.items.get(request_id)
        sequence = waiting or next((s for s in self.state.running if s.request.request_id == request_id), None)
        if sequence is None:
            raise InvalidRequestError(f"request {request_id} was cancelled, or its last step taken, outside of this LLM's calls")
        return sequence.tokens.array(sequence.request.num_prompt + seen).tolist()

    def _require_known(self, waited: set[int]) -> None:
        if waited and not self.state.running and not self.state.waiting:
            self._drawn(min(waited))


def as_batch(prompts: Any) -> list[Context]:
    """The prompts as a list: a text, a chunk and a run of token ids are one prompt, every other list is a list of prompts."""
    if isinstance(prompts, list | tuple):
        return [prompts] if len(prompts) and is_ids(prompts) else list(prompts)
    return [prompts]
