"""A front end that stops to read: what waits for it is bounded, and others are not touched."""

import socket
import time

import numpy as np
import pytest

from nanovllm.entrypoints.server.peer import AT_ONCE, Peer
from nanovllm.entrypoints.server.wire import Accepted, Answer, Submit, frame, take_frames
from tests.entrypoints.server.live import LIMIT, Live

MOST = 1 << 16


def read_all(sock: socket.socket) -> bytes:
    """All bytes up to the end of the connection."""
    sock.settimeout(LIMIT)
    parts = []
    while part := sock.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def submitted(rows: int, num_tokens: int) -> Submit:
    """Streamed requests that tell much of each token."""
    prompts = [[np.arange(300, 310, dtype=np.int32).tobytes()]] * rows
    return Submit([*range(rows)], prompts, [{"max_tokens": num_tokens, "ignore_eos": True, "logprobs": 20}] * rows, True)


@pytest.mark.unhooked
def test_a_front_end_that_reads_nothing_is_cut_off(live: Live, capfd: pytest.CaptureFixture[str]):
    with Live(live.model, limits={"most_unsent": MOST, "stall_seconds": 0.2}) as server:
        with socket.socket(socket.AF_UNIX) as stopped:
            stopped.connect(str(server.path))
            stopped.sendall(frame(submitted(8, 1500)))
            server.wait_until_running()
            assert server.post("/v1/completions", {"prompt": "Once", "max_tokens": 4}).status == 200
            server.wait_until_idle()  # its requests were cancelled, and their pages are free
            assert server.engine.metrics.generation_tokens < 8 * 1500
            got = bytearray(read_all(stopped))
        assert len([*take_frames(got)]) > 1 and len(got) < AT_ONCE  # what had left, up to the middle of a frame
        assert server.post("/v1/completions", {"prompt": "Once", "max_tokens": 4}).status == 200
        assert "reads nothing" in capfd.readouterr().err


@pytest.mark.unhooked
def test_a_front_end_that_reads_slowly_gets_all(live: Live):
    with Live(live.model, limits={"most_unsent": MOST, "stall_seconds": 30.0}) as server:
        with socket.socket(socket.AF_UNIX) as slow:
            slow.settimeout(LIMIT)
            slow.connect(str(server.path))
            slow.sendall(frame(submitted(4, 500)))
            server.wait_until_running()
            end, got, ended = time.monotonic() + LIMIT, bytearray(), 0
            while ended < 4 and time.monotonic() < end:
                time.sleep(0.002)
                got += slow.recv(4096)
                ended += sum(body.count(b"length") for body in take_frames(got))
        assert ended == 4
        server.wait_until_idle()


def test_what_is_said_in_a_round_goes_out_at_once_and_in_order():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        peer, messages = Peer(ours, 1 << 20, 0.0), [*(Accepted([i]) for i in range(100)), Answer(7, b"x" * (1 << 21)), Accepted([100])]
        for message in messages:
            peer.add(message)
        assert peer.unsent == sum(len(frame(one)) for one in messages) and not peer.blocked
        peer.flush()
        assert peer.blocked and peer.stalled  # the socket holds less than two MiB
        got = bytearray()
        while peer.unsent or len(got) < sum(len(frame(one)) for one in messages):
            got += theirs.recv(1 << 20)
            peer.flush()
        assert got == b"".join(map(frame, messages)) and not peer.stalled and not peer.frames
