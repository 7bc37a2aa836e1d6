"""`IdleSaves`: which named chunk is saved next while an engine has nothing else to do, and when a save that failed is tried again."""

import math
import os
import time
from collections.abc import Callable
from typing import Any

from nanovllm.entrypoints.server import saved_chunks
from nanovllm.entrypoints.server.named_chunks import NamedChunks
from nanovllm.errors import NanoVLLMError
from nanovllm.operator_lines import say

RETRY_SECONDS = 30.0  # a disk that is full stays full for a while
Key = tuple[str, str, int]  # a namespace, the name of a chunk, and the chunk's `liveness`


class IdleSaves:
    """Which saves were begun, and which of them failed. All methods belong to the engine's thread.

    After an error of the disk no chunk is saved for `RETRY_SECONDS`. After another error only the chunk that failed waits so long. A line
    tells the operator that the disk fails; the next such line comes only after a save that did not fail. For a chunk that fails for
    another reason there is one line.

    Args:
        clock: Seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._begun = set[Key]()  # that need not be looked at again: saved, being saved, or never to be saved
        self._failed = dict[Key, float]()  # with the times of their errors
        self._told = set[Key]()
        self._disk_told = False
        self._rests_until: float | None = None

    @property
    def wait(self) -> float | None:
        """Seconds until a save that failed is tried again. None: there is none."""
        if self._rests_until is None and not self._failed:
            return None
        due = min(self._failed.values()) + RETRY_SECONDS if self._rests_until is None else self._rests_until
        return max(0.0, due - self.clock())

    def next(self, named: NamedChunks) -> Key | None:
        """The chunk to save now. None: there is none at this time.

        Chunks that are as their files are left out, and chunks whose KV is only in their files. Those that failed come last.
        """
        now, folder = self.clock(), named.limits.folder
        present = {(space, name, one.chunk.liveness) for space, found in named.spaces.items() for name, one in found.items()}
        self._begun.intersection_update(present)
        self._told.intersection_update(present)
        self._failed = {key: since for key, since in self._failed.items() if key in present}
        if self._rests_until is not None and now < self._rests_until:
            return None
        self._rests_until = None
        if not named.limits.kept or folder is None:
            return None
        if not os.path.isdir(folder):  # somebody has deleted it while it is in use: all files have gone
            self._begun.clear()
        for key in sorted(present - self._begun, key=lambda key: (self._failed.get(key, -math.inf), key[2])):
            space, name, liveness = key
            if now < self._failed.get(key, -math.inf) + RETRY_SECONDS or liveness in named.unread:
                continue
            if not saved_chunks.is_marked(saved_chunks.path_of(named.limits, space, name), name):
                return key
            self._begun.add(key)
            self._failed.pop(key, None)
        return None

    def begin(self, key: Key) -> None:
        """Note that a save is begun."""
        self._begun.add(key)
        self._failed.pop(key, None)

    def end(self, key: Key, named: NamedChunks, value: Any) -> None:
        """Note what a save returned, or its error, of which the operator is told."""
        if not isinstance(value, NanoVLLMError):
            self._disk_told = False
            return
        self._begun.discard(key)
        self._failed[key] = self.clock()
        of_disk = isinstance(value.__cause__, OSError)
        if of_disk:
            self._rests_until = self.clock() + RETRY_SECONDS
        if not (self._disk_told if of_disk else key in self._told):
            say(f"a chunk was not saved in {named.limits.folder}: {value}; it is tried again in {RETRY_SECONDS:g} seconds")
        if of_disk:
            self._disk_told = True
        else:
            self._told.add(key)
