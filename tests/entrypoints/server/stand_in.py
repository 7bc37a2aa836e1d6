"""Replies that a test writes itself: a live server whose engine's place is taken by a script."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from nanovllm.entrypoints.server.serving_tokenizer import ReplyFormats
from nanovllm.entrypoints.server.wire import Ended
from nanovllm.errors import NanoVLLMError
from tests.entrypoints.server.live import Live


@contextlib.contextmanager
def answering(
    live: Live,
    text: str,
    *,
    finish_reason: str = "stop",
    tool_parser: str = "hermes",
    reasoning_parser: str = "think",
    step: int = 3,
    error: NanoVLLMError | None = None,
    error_after: bool = True,
    held: threading.Event | None = None,
) -> Iterator[list[dict[str, Any]]]:
    """Every request is answered with a text, whose tokens come `step` at a time. The options of the requests are in the list.

    Args:
        live: The server.
        text: The reply of each request.
        finish_reason: How it ends.
        tool_parser: The format of its calls.
        reasoning_parser: The format of its think block.
        step: The tokens per step.
        error: An error in place of the end.
        error_after: Whether the error comes after the tokens, or before the answer begins.
        held: Requests are accepted at once, and their tokens come when this event is set.
    """
    server, engine, asked = live.server, live.server.engine, list[dict[str, Any]]()
    submit, formats = engine.submit, server.formats
    assert server.tokenizer is not None
    ids = server.tokenizer.encode(text, add_special_tokens=False)

    def run(receivers: list[Any], streamed: bool) -> None:
        for receiver in receivers:
            if error is not None and not error_after:
                receiver.fail(error)
                continue
            receiver.accepted()
        tell(receivers, streamed)

    def tell(receivers: list[Any], streamed: bool) -> None:
        if held is not None and not held.is_set():
            asyncio.get_running_loop().call_later(0.01, tell, receivers, streamed)
            return
        for receiver in receivers if error is None or error_after else ():
            for at in range(0, len(ids) if streamed else 0, step):
                receiver.push(ids[at : at + step])
            if error is not None:
                receiver.fail(error)
            else:
                receiver.end(Ended(0, finish_reason, text, 2, b"", len(ids)))

    def submitted(prompts: Any, params: list[dict[str, Any]], receivers: list[Any], *, streamed: bool, **_: Any) -> list[int]:
        asked.extend(params)
        asyncio.get_running_loop().call_soon(run, receivers, streamed)
        return []

    engine.submit = submitted  # pyright: ignore[reportAttributeAccessIssue]
    server.formats = ReplyFormats.of(server.tokenizer, tool_parser, reasoning_parser)
    try:
        yield asked
    finally:
        engine.submit, server.formats = submit, formats  # pyright: ignore[reportAttributeAccessIssue]
