"""The front end's side of the socket: requests go to the engine's process, and what its steps give comes back to those who wait."""

import asyncio
from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import msgspec

from nanovllm import errors
from nanovllm.entrypoints.server.wire import (
    Accepted,
    Answer,
    Ask,
    Cancel,
    Ended,
    Failure,
    Hello,
    Inward,
    Keep,
    Outward,
    Scored,
    Stepped,
    Submit,
    frame,
    take_frames,
)
from nanovllm.errors import EngineDeadError, NanoVLLMError

KINDS: Mapping[str, type[NanoVLLMError]] = MappingProxyType(
    {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, NanoVLLMError)}
)
RECONNECT_SECONDS = 0.1


@runtime_checkable
class Receiver(Protocol):
    """Who waits for one request. The methods run in the event loop, in the middle of the delivery of a step, and must not raise."""

    def accepted(self) -> None:
        """The engine has queued the request."""
        ...

    def push(self, token_ids: list[int]) -> None:
        """A step gave these tokens. Only streamed requests are told."""
        ...

    def scored(self, scored: Scored) -> None:
        """The log-probabilities of a step's tokens, before the tokens. Only streamed requests that asked for them are told."""
        ...

    def end(self, ended: Ended) -> None:
        """The request has ended."""
        ...

    def fail(self, error: NanoVLLMError) -> None:
        """The request was refused, or the engine is lost."""
        ...


class EngineClient(asyncio.Protocol):
    """A connection to an engine's process, for one event loop.

    Attributes:
        hello: What the engine said of itself; None while there is no connection.
        greeted: Set once an engine has said hello for the first time.
    """

    def __init__(self) -> None:
        self.hello: Hello | None = None
        self.greeted = asyncio.Event()
        self._transport: asyncio.Transport | None = None
        self._receivers: dict[int, Receiver] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._tokens: dict[int, list[int]] = {}  # by request: what has come and was not given out
        self._scored: dict[int, list[Scored]] = {}
        self._numbers = count(1)
        self._inward = bytearray()
        self._decode = msgspec.msgpack.Decoder(Outward).decode
        self._changed = asyncio.Event()

    async def keep_connected(self, path: Path) -> None:
        """Connect to the engine's socket, and again whenever the connection was lost. Runs until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            try:
                await loop.create_unix_connection(lambda: self, str(path))
            except OSError:
                await asyncio.sleep(RECONNECT_SECONDS)
            else:
                await self._changed.wait()

    @property
    def alive(self) -> bool:
        """Whether an engine is there and has said hello."""
        return self.hello is not None

    @property
    def num_open(self) -> int:
        """The number of requests that have not ended."""
        return len(self._receivers)

    def submit(
        self,
        prompts: Seq[Seq[bytes | str]],
        params: list[dict[str, Any]],
        receivers: list[Receiver],
        *,
        streamed: bool,
        priority: int = 0,
        space: str = "",
        keep: Keep | None = None,
        namespace: int = 0,
    ) -> list[int]:
        """Send requests to the engine, which accepts all or refuses all.

        Args:
            prompts: The parts of each prompt: first names of chunks, then int32 token ids as bytes.
            params: The sampling options of each request that are not the defaults.
            receivers: Who is told of each request.
            streamed: Whether the receivers are told of each step's tokens.
            priority: As in `nanovllm.submit`.
            space: The namespace of the chunks.
            keep: What becomes a chunk when the only request ends.
            namespace: Whose KV the requests may share, as in `submit_many`.

        Returns:
            A number for each request, for `cancel`.

        Raises:
            EngineDeadError: There is no engine at present.
        """
        ids = [next(self._numbers) & 0xFFFFFFFF for _ in prompts]
        self._send(Submit(ids, prompts, params, streamed, priority, space, keep, namespace))
        self._receivers.update(zip(ids, receivers, strict=True))
        return ids

    def cancel(self, ids: list[int]) -> None:
        """Cancel those of the requests that have not ended. Their receivers are told nothing more."""
        left = [number for number in ids if self._receivers.pop(number, None) is not None]
        if left and self._transport is not None:
            self._send(Cancel(left))

    async def ask(self, function: str, /, **arguments: Any) -> Any:
        """Call one of the engine's functions (`engine_calls`).

        Raises:
            EngineDeadError: There is no engine at present, or it failed meanwhile.
            NanoVLLMError: What the function raised.
        """
        number = next(self._numbers) & 0xFFFFFFFF
        self._send(Ask(number, function, arguments))
        self._answers[number] = answer = asyncio.get_running_loop().create_future()
        try:
            return await answer
        finally:
            self._answers.pop(number, None)

    def _send(self, message: Inward) -> None:
        if self._transport is None or self.hello is None:
            raise EngineDeadError("the engine is not there: it is starting, or it has failed")
        self._transport.write(frame(message))

    def connection_made(self, transport: Any) -> None:
        """A connection begins."""
        self._transport = transport
        self._inward.clear()

    def connection_lost(self, exc: Exception | None) -> None:
        """The engine is gone: all who wait are told."""
        self._transport = self.hello = None
        self.give_up(EngineDeadError("the engine has failed, and this request with it"))
        self._changed.set()

    def close(self) -> None:
        """End the connection. Whoever waits still gets an error."""
        if self._transport is not None:
            self._transport.abort()

    def give_up(self, error: NanoVLLMError) -> None:
        """Tell all who wait that nothing comes any more."""
        if self._transport is not None and self._receivers:
            self._send(Cancel([*self._receivers]))
        receivers, self._receivers = self._receivers, {}
        answers, self._answers = self._answers, {}
        for receiver in receivers.values():
            receiver.fail(error)
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(error)

    def data_received(self, data: bytes) -> None:
        """Frames came in. Steps that have piled up are given to each receiver as one."""
        self._inward += data
        for body in take_frames(self._inward):
            message = self._decode(body)
            if isinstance(message, Stepped):
                self._gather(message)
            else:
                self._flush()
                self._receive(message)
        self._flush()

    def _receive(self, message: Outward) -> None:
        match message:
            case Accepted():
                for number in message.ids:
                    if (receiver := self._receivers.get(number)) is not None:
                        receiver.accepted()
            case Failure():
                error = error_of(message.kind, message.message)
                for number in message.ids:
                    if (receiver := self._receivers.pop(number, None)) is not None:
                        receiver.fail(error)
                    elif (answer := self._answers.get(number)) is not None and not answer.done():
                        answer.set_exception(error)
            case Answer():
                if (answer := self._answers.get(message.id)) is not None and not answer.done():
                    answer.set_result(message.value)
            case Hello():
                self.hello = message
                self.greeted.set()

    def _gather(self, message: Stepped) -> None:
        """Note the tokens of a step. Before a request's end its tokens are given out."""
        token_ids, tokens, at = array("i", message.token_ids).tolist(), self._tokens, 0
        for number, size in zip(array("I", message.ids), message.counts, strict=True):
            piece = token_ids[at : at + size]
            at += size
            if number in tokens:
                tokens[number] += piece
            else:
                tokens[number] = piece
        for number, scored in message.scored.items():
            self._scored.setdefault(number, []).append(scored)
        if message.ended:
            self._flush()
            for ended in message.ended:
                if (receiver := self._receivers.pop(ended.id, None)) is not None:
                    receiver.end(ended)

    def _flush(self) -> None:
        tokens, self._tokens = self._tokens, {}
        if self._scored:
            each, self._scored = self._scored, {}
            for number, parts in each.items():
                if (receiver := self._receivers.get(number)) is not None:
                    for scored in parts:
                        receiver.scored(scored)
        for number, piece in tokens.items():
            if (receiver := self._receivers.get(number)) is not None:
                receiver.push(piece)


def error_of(kind: str, message: str) -> NanoVLLMError:
    """An error of the engine, from the name of its class and its message."""
    return KINDS.get(kind, NanoVLLMError)(message)
