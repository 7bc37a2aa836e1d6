"""The file of one page of KV on disk, or of one frame: a header of fixed size, then the image of the page as raw bytes.

The header has a digest of the key and of the image. So a file that is torn, changed or renamed is found when it is read. A file never
changes after it has its name. It is written by one call of the system and read by one, and the digest is made without Python's lock. The
numbers of the header are little-endian:

| bytes | content |
|---|---|
| 0-7 | `nvkvpage` |
| 8-11 | the version of the format |
| 12-15 | 1: a frame (the KV of layers with a sliding window), apart from its page; 0: a page |
| 16-23 | the number of bytes of the image |
| 24-31 | zero |
| 32-63 | the key of the page's prefix (`state/prefix_keys.py`) |
| 64-95 | SHA-256 of bytes 0 to 63 and of the image |
"""

import hashlib
import os
from struct import Struct

from nanovllm.state.prefix_keys import KEY_BYTES, is_frame

MAGIC, VERSION = b"nvkvpage", 1
_FIELDS = Struct(f"<8sIIQ8x{KEY_BYTES}s")
HEADER_BYTES = _FIELDS.size + hashlib.sha256().digest_size


class DamagedPageError(Exception):
    """A file does not have the page that its name promises."""


def size_of(page_bytes: int) -> int:
    """The size of the file of a page, in bytes."""
    return HEADER_BYTES + page_bytes


def write_page(fd: int, key: bytes, image: memoryview) -> None:
    """Write the whole file of a page. The system brings it to the disk later: what a loss of power tears is found by its digest.

    Args:
        fd: An empty file.
        key: The key of the page's prefix, 32 bytes, or that of its frame.
        image: The bytes of the page.

    Raises:
        OSError: The file cannot be written.
    """
    head = _fields(key, image)
    parts, size = [memoryview(head + _digest(head, image)), image], 0
    while parts:
        count = os.pwritev(fd, parts, size)
        size, parts = size + count, _after(parts, count)


def read_page(fd: int, key: bytes, image: memoryview) -> None:
    """Read the image of a page, and compare its digest. After an error the content of `image` is undefined.

    Args:
        fd: The file.
        key: The key that the file must have.
        image: Where the bytes of the page are written.

    Raises:
        DamagedPageError: The file is not that of this page, was cut, or was changed.
        OSError: The file cannot be read.
    """
    head, wanted, size, more = bytearray(HEADER_BYTES), _fields(key, image), 0, bytearray(1)
    parts = [memoryview(head), image, memoryview(more)]  # the last one finds files that are too long
    while parts and (count := os.preadv(fd, parts, size)):
        size, parts = size + count, _after(parts, count)
    if size != size_of(len(image)):
        raise DamagedPageError(f"it has {size} bytes{'' if parts else ' or more'}, not {size_of(len(image))}")
    if head[: len(wanted)] != wanted:
        raise DamagedPageError("its header is not that of this page")
    if head[len(wanted) :] != _digest(wanted, image):
        raise DamagedPageError("its content was changed")


def _fields(key: bytes, image: memoryview) -> bytes:
    """The header without its digest."""
    return _FIELDS.pack(MAGIC, VERSION, is_frame(key), len(image), key[:KEY_BYTES])


def _digest(head: bytes, image: memoryview) -> bytes:
    digest = hashlib.sha256(head)
    digest.update(image)
    return digest.digest()


def _after(parts: list[memoryview], count: int) -> list[memoryview]:
    """What is left of some pieces of memory after their first `count` bytes."""
    left = list[memoryview]()
    for part in parts:
        if len(part) > count:
            left.append(part[count:])
        count = max(0, count - len(part))
    return left
