"""uvicorn's HTTP/1.1 protocol with bounds on what a client may send before a request reaches the application."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from nanovllm.entrypoints.server.errors import ApiError
from nanovllm.entrypoints.server.settings import HEADER_SECONDS, MOST_CONNECTIONS, MOST_HEADER_BYTES, MOST_HEADERS


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Long or slow heads and too many connections are refused; a head is all before the body."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._in_head, self._head_bytes = True, 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """A connection begins."""
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            self._refuse(ApiError(503, f"{MOST_CONNECTIONS} connections are open: try again later", type="server_error"))
            return
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes came in. Those of a head are counted before they are parsed."""
        if self._in_head:
            self._head_bytes += len(data)
            if self._timer is None:  # the first bytes of a further request
                self._wait_for_head()
        at = 0
        while at < len(data) and not self.transport.is_closing():
            part = data[at : at + MOST_HEADER_BYTES] if self._in_head else data[at:]
            super().data_received(part)
            at += len(part)
            if self._in_head and self._head_bytes > MOST_HEADER_BYTES:
                self._refuse(ApiError(431, f"the head of a request may have {MOST_HEADER_BYTES} bytes"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header of a head is complete."""
        super().on_header(name, value)
        if len(self.headers) > MOST_HEADERS:
            self._refuse(ApiError(431, f"a request may have {MOST_HEADERS} headers"))

    def on_headers_complete(self) -> None:
        """The head is complete."""
        self._in_head, self._head_bytes = False, 0
        self._stop_waiting()
        if not self.transport.is_closing():
            self.scope["abort"] = self.transport.abort  # pyright: ignore[reportGeneralTypeIssues]
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body is there."""
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete; the next bytes are another's head."""
        self._in_head = True
        if not self.transport.is_closing():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP."""
        self._refuse(ApiError(400, msg))

    def _wait_for_head(self) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(HEADER_SECONDS, self._refuse, ApiError(408, "the head of the request did not come in time"))

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, error: ApiError) -> None:
        """Answer with an error, unless an answer has begun, and close."""
        self._stop_waiting()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            body = error.body()
            head = f"HTTP/1.1 {error.status} Refused\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            head += "connection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        self.transport.close()
