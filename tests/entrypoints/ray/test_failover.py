"""A request runs elsewhere if its replica is lost before it has begun to answer; a stream that has begun ends with a typed error."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.entrypoints.ray import failover
from nanovllm.entrypoints.ray.failover import TRIES, Ask, responses_error, with_failover
from nanovllm.entrypoints.ray.local_server import Head
from nanovllm.entrypoints.server.api.replies import error_event
from nanovllm.entrypoints.server.errors import ApiError

EVENTS = ((b"content-type", b"text/event-stream; charset=utf-8"),)
JSON = ((b"content-type", b"application/json"),)
PING = b": ping\n\n"


class LostError(Exception):
    """A replica was lost."""


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "PAUSE_SECONDS", 0.0)


def replicas(*scripts: list[Any]) -> tuple[Ask, list[tuple[str, ...]]]:
    """A way to ask that plays one script for each try, and what it was told to avoid."""
    left, asked = iter(scripts), list[tuple[str, ...]]()

    async def ask(avoid: tuple[str, ...]) -> AsyncGenerator[Head | bytes, None]:
        asked.append(avoid)
        for piece in next(left):
            if isinstance(piece, Exception):
                raise piece
            yield piece

    return ask, asked


def answer(ask: Ask, **more: Any) -> list[Head | bytes]:
    async def all_pieces() -> list[Head | bytes]:
        return [piece async for piece in with_failover(ask, (LostError,), **more)]

    return asyncio.run(all_pieces())


def head(replica: str, status: int = 200, headers: Any = EVENTS) -> Head:
    return Head(status=status, headers=headers, replica=replica)


def code(piece: Head | bytes) -> str:
    assert isinstance(piece, bytes)
    return json.loads(piece.removeprefix(b"data: ").partition(b"\n\n")[0])["error"]["code"]


@given(st.lists(st.sampled_from(["nothing", "head", "ping"]), max_size=TRIES - 1), st.lists(st.binary(min_size=1), min_size=1))
def test_whatever_was_lost_before_it_began_the_client_reads_one_answer(losses: list[str], pieces: list[bytes]) -> None:
    failover.PAUSE_SECONDS = 0.0
    before = {"nothing": [], "head": [head("lost")], "ping": [head("lost"), PING]}
    texts = [b"data: " + piece.hex().encode() + b"\n\n" for piece in pieces]
    ask, asked = replicas(*([*before[loss], LostError()] for loss in losses), [head("last"), *texts])
    first, *got = answer(ask)
    assert isinstance(first, Head) and first.status == 200
    assert [piece for piece in got if piece != PING] == texts
    assert len(got) - len(texts) == losses.count("ping")
    assert len(asked) == len(losses) + 1 and asked[-1] == ("lost",) * sum(loss != "nothing" for loss in losses)


def test_a_stream_that_has_begun_ends_with_an_error_event() -> None:
    ask, asked = replicas([head("a"), b"data: 1\n\n", LostError()], [head("b"), b"data: 2\n\n"])
    _, one, last = answer(ask)
    assert (one, code(last), len(asked)) == (b"data: 1\n\n", "replica_lost", 1)
    assert isinstance(last, bytes) and last.endswith(b"data: [DONE]\n\n")


def test_an_answer_that_is_no_stream_and_has_begun_is_an_error() -> None:
    ask, _ = replicas([head("a", headers=JSON), b'{"id":', LostError()])
    with pytest.raises(ApiError, match="was lost"):
        answer(ask)


def test_a_stream_of_responses_ends_with_an_event_of_its_own() -> None:
    ask, _ = replicas([head("a"), b"event: response.created\ndata: {}\n\n", LostError()])
    *_, last = answer(ask, cut_off=responses_error)
    assert isinstance(last, bytes) and last.startswith(b"event: error\n")
    assert json.loads(last.partition(b"data: ")[2])["code"] == "replica_lost"


@pytest.mark.parametrize("status", ["engine_unavailable", "shutting_down"])
def test_an_engine_that_ends_is_left_for_another_one(status: str) -> None:
    gone = ApiError(503, "it has failed", type="server_error", code=status)
    answered = [head("c", headers=JSON), b"{}"]
    ask, asked = replicas([head("a", 503, JSON), gone.body()], [head("b"), error_event(gone)], answered)
    assert answer(ask) == answered
    assert asked == [(), ("a",), ("a", "b")]


def test_other_errors_are_the_answer() -> None:
    refused = ApiError(503, "no page is left", type="server_error", code="out_of_memory").body()
    ask, asked = replicas([head("a", 503, JSON), refused])
    assert answer(ask) == [head("a", 503, JSON), refused] and len(asked) == 1


def test_if_all_are_lost_the_client_is_told() -> None:
    ask, asked = replicas(*([LostError()] for _ in range(TRIES)))
    with pytest.raises(ApiError) as raised:
        answer(ask)
    assert (raised.value.status, raised.value.code, len(asked)) == (503, "replica_lost", TRIES)
    ask, _ = replicas([head("a"), PING, LostError()], *([LostError()] for _ in range(TRIES - 1)))
    assert code(answer(ask)[-1]) == "replica_lost"


def test_what_another_replica_refuses_ends_a_stream_that_is_open() -> None:
    ask, _ = replicas([head("a"), PING, LostError()], [head("b", 429, JSON), b'{"error":{"code":"queue_full"}}'])
    assert code(answer(ask)[-1]) == "replica_lost"


def test_errors_of_our_own_are_not_tried_again() -> None:
    ask, asked = replicas([KeyError("a fault")])
    with pytest.raises(KeyError):
        answer(ask)
    assert len(asked) == 1


def test_a_client_that_goes_away_closes_the_request() -> None:
    closed = list[str]()

    async def ask(avoid: tuple[str, ...]) -> AsyncGenerator[Head | bytes, None]:
        try:
            yield head("a")
            while True:
                yield b"data: 1\n\n"
        finally:
            closed.append("a")

    async def main() -> None:
        pieces = with_failover(ask, (LostError,))
        await anext(pieces)
        await anext(pieces)
        await pieces.aclose()

    asyncio.run(main())
    assert closed == ["a"]


def test_an_answer_without_a_body_has_its_head() -> None:
    ask, _ = replicas([head("a", 204, ())])
    assert answer(ask) == [head("a", 204, ())]
