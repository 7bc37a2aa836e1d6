"""A disk that stops until a test lets it go on, and calls that wait meanwhile."""

import threading
from typing import Any

import pytest

from nanovllm.chunks.storage import blocks
from tests.entrypoints.server.live import LIMIT, Answer, Live


class Slow:
    """A disk that stops at a block until `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        function = getattr(blocks, name)

        def waiting(*args: Any) -> Any:
            self.reached.set()
            assert self.go.wait(LIMIT)
            return function(*args)

        monkeypatch.setattr(blocks, name, waiting)


class Calling:
    """A POST in a thread of its own."""

    def __init__(self, live: Live, path: str, body: Any) -> None:
        self._answers: list[Answer] = []
        self._thread = threading.Thread(target=lambda: self._answers.append(live.post(path, body)))
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def answer(self) -> Answer:
        self._thread.join(LIMIT)
        return self._answers[0]


def code_of(answer: Answer) -> tuple[int, str | None]:
    return answer.status, answer.json()["error"]["code"]
