"""The file of one page of KV on disk, or of one frame: a header of fixed size, then the image of the page as raw bytes.

The header has a digest of the key and of the image. So a file that is torn, changed or renamed is found when it is read. A file never
changes after it has its name. The numbers of the header are little-endian:

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
    """Write the whole file of a page, and flush it to the disk.

    Args:
        fd: An empty file.
        key: The key of the page's prefix, 32 bytes, or that of its frame.
        image: The bytes of the page.

    Raises:
        OSError: The file cannot be written.
    """
    head = _fields(key, image)
    _write_all(fd, memoryview(head + _digest(head, image)), 0)
    _write_all(fd, image, HEADER_BYTES)
    os.fsync(fd)


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
    if (size := os.fstat(fd).st_size) != size_of(len(image)):
        raise DamagedPageError(f"it has {size} bytes, not {size_of(len(image))}")
    head, wanted = bytearray(HEADER_BYTES), _fields(key, image)
    _read_all(fd, memoryview(head), 0)
    if head[: len(wanted)] != wanted:
        raise DamagedPageError("its header is not that of this page")
    _read_all(fd, image, HEADER_BYTES)
    if head[len(wanted) :] != _digest(wanted, image):
        raise DamagedPageError("its content was changed")


def _fields(key: bytes, image: memoryview) -> bytes:
    """The header without its digest."""
    return _FIELDS.pack(MAGIC, VERSION, is_frame(key), len(image), key[:KEY_BYTES])


def _digest(head: bytes, image: memoryview) -> bytes:
    digest = hashlib.sha256(head)
    digest.update(image)
    return digest.digest()


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def _read_all(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        count = os.preadv(fd, [data[done:]], offset + done)
        if not count:
            raise DamagedPageError("it ends while it is read")
        done += count
