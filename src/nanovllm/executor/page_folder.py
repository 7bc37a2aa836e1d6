"""`PageFolder`: a folder with files of pages of KV, named by the keys of the pages' prefixes. Several processes may share it.

```
FOLDER/.nanovllm-kv.lock              locked while files get or lose their names; holds the size of all page files
FOLDER/IDENTITY/about.json            of which model, dtype and page size these pages are, for people
FOLDER/IDENTITY/5f/5f02...9c.kv       one page (`page_file.py`); the name is the key in hexadecimal digits
FOLDER/IDENTITY/5f/5f02...9c-frame.kv its frame (the KV of layers with a sliding window), where frames are apart from pages
```

A page with a key has the same content whoever computed it, so a file is written once and never changes. It is written under a temporary
name, and is renamed when it is complete. If the process stops at any point, there is the whole file, or none. No file is flushed to the
disk, which would take longer than all else: the system does that within about half a minute. After a loss of power before that, a file may
be missing, or may have a digest that does not match. Such a file is deleted when it is read, and counts as absent.

The modification time of a file says when the page was last used. When a new file would exceed the size limit of the folder, files that
were not used for the longest time are deleted, those of other models too.
"""

import json
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from hashlib import sha256
from pathlib import Path
from struct import Struct
from typing import Any

from nanovllm.executor.page_file import DamagedPageError, read_page, size_of, write_page
from nanovllm.files import delete_abandoned, make_private, open_file, temporary, write_whole
from nanovllm.state.prefix_keys import KEY_BYTES, frame_key, is_frame

LOCK, ABOUT, SUFFIX, OF_FRAME = ".nanovllm-kv.lock", "about.json", ".kv", "-frame"
SPARE = 16  # when pages are deleted, one of so many bytes of the limit becomes free, so that not every page looks for old ones
IDENTITY = re.compile(r"[0-9a-f]{32}")
NAME = re.compile(rf"([0-9a-f]{{64}})({OF_FRAME})?\.kv")
_SIZE = Struct("<qq")  # the size of all page files, and its complement, by which a torn value is found


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A page file: when it was last used, in nanoseconds, its path and its size in bytes."""

    used: int
    path: Path
    size: int


class PageFolder:
    """Pages of KV in files, with a limit on their total size.

    What is said of pages holds for frames that are apart from pages, which have keys of their own. Several threads may call methods.
    The folder knows what this process has seen: another process may have added and deleted files.

    Attributes:
        folder: The folder.
        max_bytes: The limit of all page files in it, in bytes.
        page_bytes: The bytes of the image of a page, without those of its frame if this is apart.

    Args:
        folder: The folder, which is made if it is missing.
        max_bytes: As above.
        page_bytes: As above.
        identity: All on which the content of a page depends besides its key, such as the model, as JSON values.

    Raises:
        OSError: The folder cannot be made or read.

    Examples:
        >>> from nanovllm.executor.page_folder import PageFolder
        >>> folder = PageFolder(Path("kv"), max_bytes=1 << 20, page_bytes=4, identity={"model": "tiny"})
        >>> key = bytes(32)
        >>> folder.write(key, memoryview(b"page"))
        True
        >>> image = bytearray(4)
        >>> folder.read(key, memoryview(image)), bytes(image)
        (True, b'page')
    """

    def __init__(self, folder: Path, max_bytes: int, page_bytes: int, identity: Mapping[str, Any]) -> None:
        self.folder, self.max_bytes, self.page_bytes = folder, max_bytes, page_bytes
        self._about = json.dumps({**identity, "page_bytes": page_bytes}, sort_keys=True, indent=1).encode()
        self._own = folder / sha256(self._about).hexdigest()[:32]
        self._keys = set[bytes]()
        self._make()
        delete_abandoned(self._own)
        with self._locked() as lock:
            files = self._files()
            total = self._shrunk(files, self.max_bytes) if sum(file.size for file in files) > max_bytes else self._seen(files)
            _note(lock, total)

    def _make(self) -> None:
        """Make the folders that are missing."""
        make_private(self._own)
        if not (self._own / ABOUT).exists():
            write_whole(self._own / ABOUT, self._about, mode=0o600)

    def __contains__(self, key: bytes) -> bool:
        """Whether the folder has a page, as far as this process knows."""
        return key in self._keys

    def __len__(self) -> int:
        """The number of files of this identity that this process knows."""
        return len(self._keys)

    @property
    def num_frames(self) -> int:
        """How many of these files are those of frames."""
        return sum(map(is_frame, [*self._keys]))  # of a copy: other threads write files

    def look(self, key: bytes) -> bool:
        """Whether the folder has a page. It is looked for on the disk if this process does not know it. Raises no error."""
        if key not in self._keys and os.path.exists(self._name(key)):  # a Path's own method raises if the folder may not be read
            self._keys.add(key)
        return key in self._keys

    @property
    def size(self) -> int:
        """The size of all page files in the folder, in bytes. 0 if it cannot be read."""
        with suppress(OSError):
            fd = open_file(self.folder / LOCK)
            try:
                return _noted(fd) or 0
            finally:
                os.close(fd)
        return 0

    @property
    def _spare(self) -> int:
        """The bytes that become free when files are deleted for a new one."""
        return self.max_bytes // SPARE

    @property
    def lasting_bytes(self) -> int:
        """So many bytes of files may be written one after the other, and none of them is deleted for another one of them."""
        return self.max_bytes - max(0, self._spare - size_of(self.page_bytes))

    def write(self, key: bytes, image: memoryview, used: int | None = None, is_valid: Any = None) -> bool:
        """Write a page, unless the folder has it. Pages that were not used for the longest time make room.

        Args:
            key: The key of the page.
            image: The bytes of the page.
            used: When the page was last used, in nanoseconds of Unix time. None: now.
            is_valid: A function that tells, after `image` was read, whether it was whole until then. None: it was.

        Returns:
            Whether a file was written. False too if the page is larger than the limit, or if `is_valid` says no.

        Raises:
            OSError: The file cannot be written, such as on a full disk. No part of it is left.
        """
        target, size = self._path(key), size_of(len(image))
        if not os.path.isdir(self._own):  # somebody has deleted the folder that is in use
            self._keys.clear()
            self._make()
        if self.look(key) or size > self.max_bytes:
            return False
        with temporary(self._own, 0o600) as (fd, made):
            write_page(fd, key, image)
            if is_valid is not None and not is_valid():
                return False
            used = time.time_ns() if used is None else used
            os.utime(fd, ns=(used, used))
            if not os.path.isdir(target.parent):
                target.parent.mkdir(mode=0o700, exist_ok=True)
            with self._locked() as lock:
                if target.exists():  # another process was faster
                    self._keys.add(key)
                    return False
                total = _noted(lock)
                if total is None or total + size > self.max_bytes:
                    total = self._shrunk(self._files(), self.max_bytes - max(size, self._spare))
                _note(lock, total + size)  # before the file: a process that ends here leaves a size that is too large, never too small
                os.replace(made, target)
                self._keys.add(key)
        return True

    def read(self, key: bytes, image: memoryview, used: int | None = None) -> bool:
        """Read a page into `image`, and note that it was used. A damaged file is deleted.

        Args:
            key: The key of the page.
            image: Where the bytes of the page are written. If there is no page, their content is undefined.
            used: When the page is used, in nanoseconds of Unix time. None: now.

        Returns:
            Whether the folder has the page.

        Raises:
            DamagedPageError: The file was damaged. It is deleted, if that is possible.
            OSError: The file cannot be read.
        """
        path = self._path(key)
        try:
            fd = open_file(path)
        except FileNotFoundError:
            self._keys.discard(key)
            return False
        try:
            read_page(fd, key, image)
            with suppress(OSError):  # a file of another user: its time stays as it was
                used = time.time_ns() if used is None else used
                os.utime(fd, ns=(used, used))
        except DamagedPageError:
            self._keys.discard(key)
            self._delete(path)
            raise
        except OSError:
            self._keys.discard(key)
            raise
        finally:
            os.close(fd)
        return True

    def touch(self, keys: Iterable[bytes], used: int) -> None:
        """Note when pages were last used that the folder has. Raises no error.

        Args:
            keys: The keys of the pages.
            used: When the first one was used, in nanoseconds of Unix time; the others were used right before.
        """
        with suppress(OSError), self._locked():  # so that no file is deleted while those before it are noted
            for place, key in enumerate(keys):
                with suppress(OSError):  # it has gone, or it is that of another user
                    os.utime(self._name(key), ns=(used - place, used - place))

    def discard(self, key: bytes) -> None:
        """Delete a page, if the folder has it.

        Raises:
            OSError: It cannot be deleted.
        """
        self._keys.discard(key)
        self._delete(self._path(key))

    def measure(self, num_pages: int, num_threads: int) -> float:
        """Write some pages of random bytes, read them in several threads, and delete them.

        Returns:
            The bytes that the threads read per second together. What the system keeps in memory of the files is dropped before, where it
            allows it.

        Raises:
            OSError: They cannot be written or read.
        """
        image, keys = memoryview(bytearray(secrets.token_bytes(self.page_bytes))), [secrets.token_bytes(32) for _ in range(num_pages)]
        try:
            for key in keys:
                self.write(key, image)
                with suppress(OSError):
                    _forget_content(self._path(key))
            with ThreadPoolExecutor(num_threads) as threads:
                start = time.perf_counter()
                count = sum(threads.map(lambda key: self.read(key, memoryview(bytearray(self.page_bytes))), keys))
            return max(1, count) * self.page_bytes / max(1e-9, time.perf_counter() - start)
        finally:
            for key in keys:
                with suppress(OSError):
                    self.discard(key)

    def about(self, name: str) -> Any:
        """A small JSON value that was noted with the pages of this identity; None if there is none."""
        with suppress(OSError, ValueError, RecursionError), os.fdopen(open_file(self._own / name), "rb") as file:
            return json.loads(file.read())
        return None

    def note(self, name: str, value: Any) -> None:
        """Note a small JSON value with the pages of this identity.

        Raises:
            OSError: It cannot be written.
        """
        write_whole(self._own / name, json.dumps(value).encode(), mode=0o600)

    def _name(self, key: bytes) -> str:
        """The file of a page. As a string, because thousands are looked for at a time."""
        name = key[:KEY_BYTES].hex() + OF_FRAME if is_frame(key) else key.hex()
        return f"{self._own}{os.sep}{name[:2]}{os.sep}{name}{SUFFIX}"

    def _path(self, key: bytes) -> Path:
        return Path(self._name(key))

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the folder's lock, which excludes other processes and threads. The block is given the open file of the size."""
        fd = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            flock(fd, LOCK_EX)  # each call opens the file anew, so threads exclude each other too
            yield fd
        finally:
            os.close(fd)

    def _files(self) -> list[StoredFile]:
        """All page files of the folder. The lock must be held."""
        found = list[StoredFile]()
        for identity in _entries(self.folder):
            for part in _entries(Path(identity.path)) if IDENTITY.fullmatch(identity.name) else ():
                for entry in _entries(Path(part.path)) if len(part.name) == 2 else ():
                    if NAME.fullmatch(entry.name):
                        with suppress(OSError):
                            status = entry.stat(follow_symlinks=False)
                            found.append(StoredFile(used=status.st_mtime_ns, path=Path(entry.path), size=status.st_size))
        return found

    def _seen(self, files: list[StoredFile]) -> int:
        """Learn which pages there are. Returns the size of all."""
        own = {key_in(file.path.name) for file in files if file.path.parent.parent == self._own}
        self._keys.intersection_update(own)
        self._keys.update(own)
        return sum(file.size for file in files)

    def _shrunk(self, files: list[StoredFile], limit: int) -> int:
        """Delete files until the rest is within a limit, the least recently used first. Returns the size of the rest."""
        size, left = sum(file.size for file in files), list[StoredFile]()
        for file in sorted(files, key=lambda file: file.used):
            if size > limit:
                file.path.unlink(missing_ok=True)
                size -= file.size
            else:
                left.append(file)
        return self._seen(left)

    def _delete(self, path: Path) -> None:
        """Delete one file, and count it."""
        with suppress(FileNotFoundError), self._locked() as lock:
            size, total = path.stat().st_size, _noted(lock)
            path.unlink()
            if total is not None:
                _note(lock, max(0, total - size))


def key_in(name: str) -> bytes:
    """The key of the page or frame whose file has this name.

    Raises:
        ValueError: No page and no frame has such a name.
    """
    if (parts := NAME.fullmatch(name)) is None:
        raise ValueError(f"{name!r} is not the name of the file of a page")
    key = bytes.fromhex(parts[1])
    return frame_key(key) if parts[2] else key


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a folder; nothing if it is none."""
    with suppress(OSError), os.scandir(folder) as found:
        return [*found]
    return []


def _noted(fd: int) -> int | None:
    """The size that the lock file holds, or None if it holds none."""
    data = os.pread(fd, _SIZE.size, 0)
    if len(data) != _SIZE.size:
        return None
    size, complement = _SIZE.unpack(data)
    return size if size >= 0 and complement == ~size else None


def _note(fd: int, size: int) -> None:
    os.pwrite(fd, _SIZE.pack(size, ~size), 0)


def _forget_content(path: Path) -> None:
    """Ask the system to drop what it keeps in memory of a file, so that a later read is from the disk. It drops only what is flushed."""
    fd = open_file(path)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
