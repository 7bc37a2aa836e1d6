"""uvicorn's HTTP/1.1 protocol with bounds on what a client may send, and on how slowly it may send and read."""

import asyncio
import logging
import socket
import struct
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from nanovllm.entrypoints.server.errors import ApiError
from nanovllm.entrypoints.server.settings import Limits

AT_ONCE = struct.pack("ii", 1, 0)  # the kernel's buffer is given up, and the client gets a reset
access = logging.getLogger("nanovllm.access")


class BoundedProtocol(HttpToolsProtocol):
    """One connection. It carries one request at a time: what a client sends ahead is not answered, so that its end is always noticed.

    Args:
        limits: The bounds.
        *args: As in uvicorn.
        **options: As in uvicorn.
    """

    def __init__(self, limits: Limits, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.limits = limits
        self._in_head, self._head_bytes = True, 0
        self._deaf = False  # what comes in is thrown away
        self._timer: asyncio.TimerHandle | None = None
        self._unsent, self._moved = 0, self.loop.time()

    def connection_made(self, transport: Any) -> None:
        """A connection begins."""
        super().connection_made(transport)
        self._wait_for_head()
        if len(self.connections) > self.limits.connections:
            self._refuse(ApiError(503, f"{self.limits.connections} connections are open: try again later", type="server_error"))

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._stop_waiting()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes came in. Those of a head are counted before they are parsed."""
        if self._deaf:
            return
        most = self.limits.head_bytes
        if self._in_head:
            self._head_bytes += len(data)
            if self._timer is None:  # the first bytes of a further request
                self._wait_for_head()
        at = 0
        while at < len(data) and not self._deaf and not self.transport.is_closing():
            part = data[at : at + most] if self._in_head else data[at:]
            super().data_received(part)
            at += len(part)
            if self._in_head and self._head_bytes > most:
                self._refuse(ApiError(431, f"the head of a request may have {most} bytes"))

    def on_message_begin(self) -> None:
        """A request begins."""
        if self.cycle is not None and not self.cycle.response_complete and not self._deaf:
            self.cycle.keep_alive = False
            self._deaf = True
        if not self._deaf:
            super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header of a head is complete."""
        if self._deaf:
            return
        super().on_header(name, value)
        if len(self.headers) > self.limits.headers:
            self._refuse(ApiError(431, f"a request may have {self.limits.headers} headers"))

    def on_headers_complete(self) -> None:
        """The head is complete."""
        if self._deaf:
            return
        self._in_head, self._head_bytes = False, 0
        self._stop_waiting()
        super().on_headers_complete()
        if self.parser.should_upgrade():  # pyright: ignore[reportOptionalMemberAccess]
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """A part of the body is there."""
        if not self._deaf:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete; the next bytes are another's head."""
        if self._deaf:
            return
        self._in_head = True
        super().on_message_complete()
        if self.cycle.response_complete:  # the answer came before the whole body
            self._wait(self.limits.keep_alive_seconds, self.transport.close)

    def on_response_complete(self) -> None:
        """The answer was written. The rest of the request is read and thrown away, so that the client reads the answer."""
        super().on_response_complete()
        if not self._in_head and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._wait(self.limits.body_seconds, self.transport.abort)

    def tick(self, now: float) -> None:
        """Called every second: drop a client that reads nothing of what was sent."""
        unsent = self.transport.get_write_buffer_size()
        if not self._unsent or unsent < self._unsent:
            self._moved = now
        elif now - self._moved > self.limits.stall_seconds:
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
            self.transport.abort()
        self._unsent = unsent

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP."""
        self._refuse(ApiError(400, msg))

    def _unsupported_upgrade_warning(self) -> None:
        """The request is answered as any other; what follows it is no HTTP."""
        self._deaf = True

    def _wait_for_head(self) -> None:
        self._wait(self.limits.head_seconds, self._refuse, ApiError(408, "the head of the request did not come in time"))

    def _wait(self, seconds: float, then: Callable[..., None], *args: Any) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(seconds, then, *args)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, error: ApiError) -> None:
        """Answer with an error, unless an answer has begun, and close when the client has read it."""
        if self._deaf or self.transport.is_closing():
            return
        self._deaf = True
        self._stop_waiting()
        self._unset_keepalive_if_required()
        running = None if self.cycle is None or self.cycle.response_complete else self.cycle
        if running is not None:
            running.disconnected = True
            running.message_event.set()
        if running is None or not running.response_started:
            body = error.body()
            head = f"HTTP/1.1 {error.status} Refused\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
            access.info("%s - %r %d", "-" if self.client is None else self.client[0], error.message, error.status)
        if not self.transport.can_write_eof():  # TLS
            self.transport.close()
            return
        self.transport.write_eof()
        self._wait(self.limits.linger_seconds, self.transport.abort)
