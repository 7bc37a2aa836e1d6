"""What an engine's process and its front ends say to each other: frames of four bytes of length and one msgpack value, on a Unix socket.

Each front end numbers its requests itself. Token ids are little-endian int32 in bytes.
"""

import struct
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

import msgspec

LENGTH = struct.Struct("<I")
MOST_BYTES = 1 << 28  # of one frame


class Keep(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What becomes a chunk when a request ends.

    Attributes:
        space: The namespace.
        name: The chunk's name.
        what: "prompt": the prompt alone, for requests that only make a chunk and are not counted. "all": the prompt and the reply. "reply":
            these without the reply's thinking.
        replaced: Whether an older chunk of the name is replaced.
    """

    space: str
    name: str
    what: str
    replaced: bool = False

    @property
    def field(self) -> str:
        """The field of the request that lets the chunk replace another."""
        return "replace" if self.what == "prompt" else "keep_replace"


class Submit(msgspec.Struct, tag=1, array_like=True, frozen=True, gc=False):
    """Queue requests, all or none.

    Attributes:
        ids: A number for each request.
        prompts: The parts of each prompt: first the names of chunks, then token ids.
        params: The sampling options of each request that are not the defaults of `SamplingParams`.
        streamed: Whether each step's tokens are sent, and not only the end.
        priority: As in `submit`.
        space: The namespace of the names.
        keep: What becomes a chunk; only for one request.
        namespace: As in `submit_many`.
    """

    ids: list[int]
    prompts: Seq[Seq[Any]]
    params: list[dict[str, Any]]
    streamed: bool
    priority: int = 0
    space: str = ""
    keep: Keep | None = None
    namespace: int = 0


class Cancel(msgspec.Struct, tag=2, array_like=True, frozen=True, gc=False):
    """Cancel those of the requests that have not ended. There is no answer."""

    ids: list[int]


class Ask(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """Call one of the engine's functions between two steps, by name."""

    id: int
    name: str
    arguments: dict[str, Any]


class Hello(msgspec.Struct, tag=10, array_like=True, frozen=True):
    """The first frame of an engine.

    Attributes:
        max_model_len: The most tokens of a prompt and its reply together, by the engine's limit and its KV memory.
        vocab_size: The number of token ids.
        max_num_seqs: How many requests run at the same time.
        device: The device's name.
        dtype: The type of the weights.
        num_pages: Pages of KV memory.
        page_size: Tokens per page.
        end_ids: The model's end-of-sequence tokens.
    """

    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    device: str
    dtype: str
    num_pages: int
    page_size: int
    end_ids: list[int]


class Failure(msgspec.Struct, tag=11, array_like=True, frozen=True, gc=False):
    """Requests or a call that were refused. `kind` is the name of an exception's class in `nanovllm.errors`."""

    ids: list[int]
    kind: str
    message: str


class Accepted(msgspec.Struct, tag=12, array_like=True, frozen=True, gc=False):
    """Requests that were queued, so that their answers begin: an error that comes later cannot be told by an HTTP status."""

    ids: list[int]


class Scored(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Log-probabilities of n tokens, little-endian.

    Attributes:
        logprobs: Those of the tokens, float32 `[n]`.
        top_ids: The k most probable tokens in the place of each, int32 `[n, k]`.
        top_logprobs: Their log-probabilities, float32 `[n, k]`.
    """

    logprobs: bytes
    top_ids: bytes = b""
    top_logprobs: bytes = b""


class Ended(msgspec.Struct, array_like=True, frozen=True):
    """The end of one request.

    Attributes:
        id: The request's number.
        finish_reason: As in `RequestOutput`.
        text: The whole reply.
        num_cached: Prompt tokens that were reused.
        token_ids: The tokens of the reply, or of its last step if the request is streamed.
        num_tokens: The number of tokens of the reply.
        error: The kind and the message of the error of a request that failed, else None.
        kept: The chunk that the request became, as clients are told of it; or `{"error": why it did not}`; or None.
        scored: The log-probabilities of `token_ids`, if the request asked for them.
        out_of_pages: As in `RequestOutput`.
    """

    id: int
    finish_reason: str
    text: str
    num_cached: int
    token_ids: bytes
    num_tokens: int
    error: tuple[str, str] | None = None
    kept: Any = None
    scored: Scored | None = None
    out_of_pages: bool = False


class Stepped(msgspec.Struct, tag=13, array_like=True, frozen=True, gc=False):
    """What a step gave: for each of `ids` (uint32), `counts` (uint8) of `token_ids` (int32), in order; and the requests that ended.
    `scored` has the log-probabilities of these tokens, for the requests that asked for them.
    """

    ids: bytes
    counts: bytes
    token_ids: bytes
    ended: list[Ended]
    scored: dict[int, Scored] = {}


class Answer(msgspec.Struct, tag=14, array_like=True, frozen=True):
    """What a function of the engine returned."""

    id: int
    value: Any


Inward = Submit | Cancel | Ask
Outward = Hello | Failure | Accepted | Stepped | Answer
_encoder = msgspec.msgpack.Encoder()


def frame(message: Inward | Outward) -> bytes:
    """A message with its length before it."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


def take_frames(buffer: bytearray) -> Iterator[bytes]:
    """Remove the complete frames from the beginning of a buffer, and yield their bodies.

    Raises:
        ValueError: A frame is longer than `MOST_BYTES`.
    """
    at, end = 0, len(buffer)
    try:
        while end - at >= LENGTH.size:
            (size,) = LENGTH.unpack_from(buffer, at)
            if size > MOST_BYTES:
                raise ValueError(f"a frame of {size} bytes; the longest have {MOST_BYTES}")
            if end - at - LENGTH.size < size:
                return
            at += LENGTH.size + size
            yield bytes(buffer[at - size : at])
    finally:
        del buffer[:at]
