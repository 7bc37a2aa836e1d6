"""`KeptChunks`: chunks that requests to an engine in this process name, put before their prompts, and keep."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np

from nanovllm.chunks.compose import compose
from nanovllm.chunks.handles import release
from nanovllm.chunks.prefill import prefill
from nanovllm.chunks.thinking import think_spans
from nanovllm.entrypoints.async_llm import AsyncLLM
from nanovllm.errors import ChunkExistsError, InvalidRequestError, UnknownChunkError
from nanovllm.models.model import Model
from nanovllm.state.chunk import Chunk
from nanovllm.state.engine_state import EngineState
from nanovllm.state.request import RequestOutput


class KeptChunks:
    """Chunks of one engine by name.

    Attributes:
        chunks: The chunks. They live until `AsyncLLM.apply` releases them, or another is kept under their name.
    """

    __slots__ = ("_llm", "chunks")

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self.chunks: dict[str, Chunk] = {}

    @asynccontextmanager
    async def before(self, given: Any) -> AsyncGenerator[Chunk | None, None]:
        """The one chunk before a prompt. Several are joined, and what joined them is released at the end.

        Args:
            given: Names and chunks in their order, or None.

        Raises:
            InvalidRequestError: It is neither.
            UnknownChunkError: There is no chunk of a name.
        """
        if given is not None and not isinstance(given, list | tuple):
            raise InvalidRequestError(f"chunks={given!r} must be a list of names and chunks")
        found = [self._found(each) for each in given or ()]
        if len(found) < 2:
            yield found[0] if found else None
            return
        joining = asyncio.ensure_future(self._llm.apply(partial(compose, chunks=found)))
        try:
            yield await asyncio.shield(joining)
        finally:  # the joined chunk is released even if the task was cancelled while it was made
            await asyncio.wait([joining])
            if self._llm.refusal is None and joining.exception() is None and (joined := joining.result()) is not None:
                await self._llm.apply(lambda _, state: release(state, joined))

    def _found(self, given: Any) -> Chunk:
        if isinstance(given, Chunk):
            return given
        if not isinstance(given, str):
            raise InvalidRequestError(f"chunks has {given!r}, which is neither a name nor a chunk")
        if given not in self.chunks:
            raise UnknownChunkError(f"there is no chunk {given!r}; there are {', '.join(map(repr, self.chunks)) or 'none'}")
        return self.chunks[given]

    def require_free(self, name: str, *, replaced: bool) -> None:
        """Check that a chunk may get a name. Raises `ChunkExistsError` if another has it and may not be replaced."""
        if name in self.chunks and not replaced:
            raise ChunkExistsError(f"there is a chunk {name!r} already: give another name, or keep_replace")

    async def keep(self, name: str, base: Chunk | None, output: RequestOutput, *, thinking: bool) -> Chunk:
        """Make a chunk of a prompt and its reply. The prefix index still has their KV, so only what follows a think block runs again.

        Args:
            name: Its name. A chunk that had the name is released.
            base: The chunk before the prompt.
            output: The reply.
            thinking: Whether think blocks of the reply stay.

        Raises:
            OutOfPagesError: There is no room for it.
        """
        begin = 0 if base is None else len(base)

        def kept(model: Model, state: EngineState) -> tuple[EngineState, Chunk]:
            tokens = np.concatenate([output.prompt_token_ids, np.asarray(output.token_ids, np.int32)])
            start = len(output.prompt_token_ids)
            stay = np.ones(len(tokens), bool)
            if not thinking and model.tokenizer is not None:
                for first, last in think_spans(model.tokenizer, tokens, start, model.config.eos_token_ids):
                    stay[first:last] = False
            rest = tokens[begin:][stay[begin:]]
            state, made = prefill(model, state, rest if base is None else [base, rest])
            if (old := self.chunks.get(name)) is not None and old.liveness in state.chunks:
                state = release(state, old)
            return state, made

        made = await self._llm.apply(kept)
        assert made is not None
        self.chunks[name] = made
        return made
