"""The process of a rank other than 0: it makes the calls that rank 0 sends, in their order, on its own part of the model.

`python -P -m nanovllm.entrypoints.ranks.follower SOCKET MEMORY RANK SIZE PARENT` is started by rank 0, with open files by their numbers.
With `-P` it finds modules where rank 0 finds them: in the current folder only if rank 0 does.
"""

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import torch

from nanovllm.entrypoints.process import freeze
from nanovllm.entrypoints.ranks.beats import Beats
from nanovllm.entrypoints.ranks.calls import called
from nanovllm.entrypoints.ranks.channel import Kind, Outcome, receive, send
from nanovllm.entrypoints.ranks.settings import Settings, begun, build
from nanovllm.executor.distributed import store_at
from nanovllm.executor.executor import runtime_of
from nanovllm.models.model import Model
from nanovllm.state.device_errors import message_of
from nanovllm.state.digest import digest
from nanovllm.state.engine_state import EngineState

R = TypeVar("R")


class Repeated:
    """The mirror of a rank that repeats the calls of rank 0: it makes them here alone."""

    def run(self, name: str, call: Callable[[], R], arguments: Mapping[str, Any]) -> R:
        """Make the call."""
        return call()

    def compare(self, state: Any) -> None:
        """Rank 0 compares."""

    def require_alive(self) -> None:
        """Rank 0 looks after the ranks."""

    def close(self) -> None:
        """Rank 0 ends the ranks."""


def main(channel: int, memory: int, rank: int, size: int, parent: int) -> None:
    """Follow rank 0 until it says that all is over, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is rank 0's business
    link, beats = socket.socket(fileno=channel), Beats(size, memory)
    beats.begin(rank, parent)
    groups = list[Any]()
    try:
        _, _, body, _ = receive(link)
        settings = Settings.decode(body)
        send(link, Kind.HELLO)
        _, _, body, _ = receive(link)
        store = store_at(int(body)) if settings.grouped else None
        model, state = build(settings, rank, store, groups.append)
        runtime_of(state).mirror = Repeated()
        freeze()  # all ranks wait for one that collects garbage
    except EOFError:
        return
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        send(link, Kind.REFUSED, Outcome(number=0, digest="", error=type(error).__name__, message=message_of(error)).encode())
        return
    send(link, Kind.READY, Outcome(number=0, digest=begun(state, whole=settings.whole)).encode())
    with suppress(EOFError, BrokenPipeError, ConnectionResetError), torch.no_grad():
        follow(link, model, state, beats, rank, whole=settings.whole)


def follow(link: socket.socket, model: Model, state: EngineState, beats: Beats, rank: int, *, whole: bool) -> None:
    """Make the calls that come.

    Raises:
        EOFError: Rank 0 is gone.
    """
    number, error, message = 0, "", ""
    while True:
        kind, report, body, files = receive(link)
        if kind is Kind.END:
            return
        if kind is Kind.CALL:
            number, error, message = number + 1, "", ""
            try:
                state, _ = called(model, state, body, files)
            except BaseException as raised:
                error, message = type(raised).__name__, message_of(raised)
                if not report:
                    send(link, Kind.FAILED, Outcome(number=number, digest="", error=error, message=message).encode())
            finally:
                for file in files:
                    os.close(file)
            beats.counts[rank, 1] = number
        if report or kind is Kind.REPORT:
            found = Outcome(number=number, digest=digest(state, whole=whole).hex(), error=error, message=message)
            send(link, Kind.OUTCOME, found.encode())


if __name__ == "__main__":
    try:
        main(*map(int, sys.argv[1:]))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # threads of collective operations may wait for ranks that are gone
