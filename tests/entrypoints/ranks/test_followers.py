"""The thread that watches over the other ranks waits for no process once the engine has ended: `close` waits for the thread."""

import socket
from typing import Any

import pytest

from nanovllm.entrypoints.ranks.followers import Followers


class Gone:
    """A rank that has closed its connection, and whose process would end late."""

    def __init__(self) -> None:
        self.link, theirs = socket.socketpair()
        theirs.close()
        self.waits = 0

    def ended(self) -> str:
        self.waits += 1
        return "it is gone"


@pytest.mark.parametrize(("dead", "closing", "waits"), [(None, False, 1), ("another rank is gone", False, 0), (None, True, 0)])
@pytest.mark.usefixtures("untyped")
def test_only_the_first_rank_that_is_gone_is_waited_for(dead: str | None, closing: bool, waits: int) -> None:
    followers: Any = Followers.__new__(Followers)
    followers.dead, followers.closing, causes = dead, closing, list[str]()
    followers.fail = causes.append
    one = Gone()
    with one.link:
        followers._read(one)
    assert one.waits == len(causes) == waits
