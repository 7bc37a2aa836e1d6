"""A request whose replica is lost runs on another one if its client has been told nothing yet; otherwise its stream ends with an error."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec

from nanovllm.entrypoints.ray.local_server import Head
from nanovllm.entrypoints.server.api.replies import error_event
from nanovllm.entrypoints.server.errors import ApiError

TRIES = 5
PAUSE_SECONDS = 0.1  # before another try; each further pause is twice as long
GONE = ("engine_unavailable", "shutting_down")  # codes of answers that another replica may give otherwise
LOST = "the replica that answered was lost, and the rest of this reply with it: send the request again"
NO_REPLICA = "the replicas that had this request were lost one after another: send it again"

Ask = Callable[[tuple[str, ...]], AsyncGenerator[Head | bytes, None]]


def lost_error(message: str = LOST) -> ApiError:
    """The error of a request whose replica was lost. OpenAI's clients try it again by themselves if it comes instead of an answer."""
    return ApiError(503, message, type="server_error", code="replica_lost", headers=(("retry-after", "1"),))


async def with_failover(
    ask: Ask, lost: tuple[type[BaseException], ...], *, cut_off: Callable[[ApiError], bytes] = error_event
) -> AsyncGenerator[Head | bytes, None]:
    """The answer to a request, from the first replica that lives long enough to begin it.

    Comments of a stream, which keep connections open, are passed on but do not count as a beginning.

    Args:
        ask: Sends the request to a replica, and yields the answer. It is given the names of the replicas that have failed the request.
        lost: The exceptions that say that a replica was lost.
        cut_off: Makes the end of a stream that failed.

    Yields:
        The head and the pieces of the answer. If the replica is lost after the first piece, the last piece of a stream is an event with
        an error of the code `replica_lost`, as OpenAI's clients read it.

    Raises:
        ApiError: No replica has begun to answer, or one was lost in the middle of an answer that is no stream.

    Examples:
        >>> async def ask(avoid):
        ...     yield Head(status=200, headers=(), replica="b" if avoid else "a")
        ...     if not avoid:
        ...         raise ConnectionError
        ...     yield b"hello"
        >>> async def main():
        ...     return [piece async for piece in with_failover(ask, (ConnectionError,))]
        >>> asyncio.run(main())[-1]
        b'hello'
    """
    avoid: tuple[str, ...] = ()
    told: Head | None = None  # what the client has
    begun = False
    for attempt in range(TRIES):
        head: Head | None = None
        try:
            async with aclosing(ask(avoid)) as pieces:
                async for piece in pieces:
                    if isinstance(piece, Head):
                        head = piece
                        continue
                    assert head is not None
                    if not begun and _elsewhere(head, piece) and attempt + 1 < TRIES:
                        break
                    if told is None:
                        told = head
                        yield head
                    elif not begun and not head.streams:  # another replica refused what is an open stream by now
                        yield cut_off(ApiError(head.status, piece.decode(errors="replace"), type="server_error", code="replica_lost"))
                        return
                    begun = begun or not _is_comment(piece)
                    yield piece
                else:
                    if told is None and head is not None:
                        yield head
                    return
        except lost:
            if begun:
                assert told is not None
                if not told.streams:
                    raise lost_error() from None
                yield cut_off(lost_error())
                return
        avoid = (*avoid, head.replica) if head is not None and head.replica else avoid
        await asyncio.sleep(PAUSE_SECONDS * 2**attempt)
    if told is not None:
        yield cut_off(lost_error(NO_REPLICA))
        return
    raise lost_error(NO_REPLICA)


def responses_error(error: ApiError) -> bytes:
    """The end of a stream of `/v1/responses` that failed.

    References:
        https://platform.openai.com/docs/api-reference/responses-streaming/error
    """
    event = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
    return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"


def _is_comment(piece: bytes) -> bool:
    return piece.startswith(b":") and b"\ndata:" not in piece and b"\nevent:" not in piece


def _elsewhere(head: Head, piece: bytes) -> bool:
    """Whether an answer says that its replica ends, so that another one should be asked."""
    if head.status != 503 and not (head.streams and piece.startswith(b'data: {"error"')):
        return False
    try:
        return msgspec.json.decode(piece.removeprefix(b"data: ").partition(b"\n\n")[0])["error"]["code"] in GONE
    except (msgspec.DecodeError, TypeError, KeyError):
        return False
