"""`Unwritten`: what is left of a prefix index and of host memory to write to the disk, as far as the folder has room for it."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False, kw_only=True)
class Unwritten:
    """What is left of a prefix index and of host memory to write.

    Attributes:
        version: What the pool is that of: the epoch of the state, and the pages that failed calls have lost since.
        pool: The pool, with the index.
        pages: Pages of the index that were not looked at yet, those that were used last first.
        host_pages: Host pages that were not looked at yet, those that were used last first. They come after `pages`.
        room: How many bytes of files the folder has room for besides those of what was looked at.
        crowded: Whether the folder may have to delete files for what is written. Then files of what was looked at count as used.
        used: When the next page counts as used, in nanoseconds of Unix time.
        missing: The (key, page) and (key, frame) pairs that are not on disk.

    Examples:
        >>> from nanovllm.executor.unwritten import Unwritten
        >>> todo = Unwritten(host_pages=[4, 2], room=5)
        >>> todo.fits(3), bool(todo)
        (True, True)
        >>> todo.fits(3), bool(todo)
        (False, False)
    """

    version: Any = None
    pool: Any = None
    pages: list[int] = field(default_factory=list)
    host_pages: list[int] = field(default_factory=list)
    room: int = 0
    crowded: bool = False
    used: int = 0
    missing: list[tuple[bytes, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.host_pages or self.pages or self.missing)

    def fits(self, num_bytes: int) -> bool:
        """Take the room of one more file. If the folder has none, nothing that was used earlier is looked at any more.

        It would replace the file of what was used later.
        """
        if num_bytes <= self.room:
            self.room -= num_bytes
            return True
        self.room = 0
        self.pages.clear()
        self.host_pages.clear()
        return False
