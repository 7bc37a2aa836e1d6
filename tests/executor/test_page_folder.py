"""Pages of KV in files: digests, the size limit, several processes, and processes and machines that stop at any point."""

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import files
from nanovllm.executor.page_file import HEADER_BYTES, DamagedPageError, size_of
from nanovllm.executor.page_folder import LOCK, PageFolder, key_in
from nanovllm.state.prefix_keys import frame_key

PAGE = 48
CALLS = ("open", "pwrite", "pwritev", "preadv", "fsync", "replace", "unlink", "utime", "mkdir", "pread", "write")


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def image_of(number: int) -> bytes:
    return np.random.default_rng(number).bytes(PAGE)


def opened(folder: Path, max_pages: int = 8, identity: str = "a") -> PageFolder:
    return PageFolder(folder, max_pages * size_of(PAGE), PAGE, {"model": identity})


def put(folder: PageFolder, number: int, used: int | None = None) -> bool:
    return folder.write(key_of(number), memoryview(image_of(number)), used)


def get(folder: PageFolder, number: int) -> bytes | None:
    """The page, or None if there is none or if it is damaged."""
    image = bytearray(PAGE)
    try:
        return bytes(image) if folder.read(key_of(number), memoryview(image)) else None
    except DamagedPageError:
        return None


def stored(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


def test_a_page_comes_back_in_another_process(tmp_path: Path):
    assert put(opened(tmp_path), 1) and not put(opened(tmp_path), 1)
    folder = opened(tmp_path)
    assert key_of(1) in folder and len(folder) == 1 and get(folder, 1) == image_of(1)
    assert get(folder, 2) is None and key_of(2) not in folder
    assert folder.size == size_of(PAGE)


def test_pages_of_another_identity_are_not_found(tmp_path: Path):
    put(opened(tmp_path), 1)
    assert get(opened(tmp_path, identity="b"), 1) is None


def test_a_page_that_another_process_writes_later_is_found(tmp_path: Path):
    folder = opened(tmp_path)
    put(opened(tmp_path), 1)
    assert key_of(1) not in folder and folder.look(key_of(1)) and key_of(1) in folder
    assert not put(folder, 1)


def test_a_page_and_its_frame_have_files_of_their_own(tmp_path: Path):
    folder, key, frame = opened(tmp_path), key_of(1), frame_key(key_of(1))
    assert put(folder, 1) and frame not in folder
    assert folder.write(frame, memoryview(image_of(2)))
    folder = opened(tmp_path)
    assert key in folder and frame in folder and (len(folder), folder.num_frames) == (2, 1)
    assert {key_in(path.name) for path in stored(tmp_path)} == {key, frame} and folder.size == 2 * size_of(PAGE)
    image = bytearray(PAGE)
    assert folder.read(frame, memoryview(image)) and image == image_of(2) and get(folder, 1) == image_of(1)
    one, other = stored(tmp_path)
    os.replace(one, other)  # a page in place of its frame, or a frame in place of its page
    with pytest.raises(DamagedPageError):
        folder.read(key_in(other.name), memoryview(image))
    with pytest.raises(ValueError, match="not the name"):
        key_in("about.json")


def test_no_other_user_can_read_the_pages(tmp_path: Path):
    put(opened(tmp_path / "kv"), 1)
    assert all(not path.stat().st_mode & 0o077 for path in [tmp_path / "kv", *(tmp_path / "kv").rglob("*")])


@pytest.mark.parametrize("keep", range(0, size_of(PAGE) + 1, 3))
def test_a_file_that_was_cut_at_any_byte_counts_as_absent(tmp_path: Path, keep: int):
    folder = opened(tmp_path)
    put(folder, 1)
    (path,) = stored(tmp_path)
    os.truncate(path, keep)
    whole, folder = keep == size_of(PAGE), opened(tmp_path)
    assert get(folder, 1) == (image_of(1) if whole else None)
    assert path.exists() == whole
    assert put(folder, 1) != whole and get(folder, 1) == image_of(1)


@pytest.mark.parametrize("at", range(size_of(PAGE)))
def test_a_bit_that_flips_anywhere_is_found(tmp_path: Path, at: int):
    put(opened(tmp_path), 1)
    (path,) = stored(tmp_path)
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << at % 8
    path.write_bytes(data)
    folder = opened(tmp_path)
    assert get(folder, 1) is None and not path.exists() and key_of(1) not in folder
    assert folder.size == 0


def test_zeros_in_place_of_blocks_that_were_not_flushed_are_found(tmp_path: Path):
    put(opened(tmp_path), 1)
    (path,) = stored(tmp_path)
    for header in (path.read_bytes()[:HEADER_BYTES], bytes(HEADER_BYTES)):
        path.write_bytes(header + bytes(PAGE))
        assert get(opened(tmp_path), 1) is None and not path.exists()


def test_a_file_that_is_too_long_is_found(tmp_path: Path):
    put(opened(tmp_path), 1)
    (path,) = stored(tmp_path)
    path.write_bytes(path.read_bytes() + b"x")
    assert get(opened(tmp_path), 1) is None and not path.exists()


def test_short_reads_are_no_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, preadv = opened(tmp_path), os.preadv
    put(folder, 1)
    monkeypatch.setattr(os, "preadv", lambda fd, parts, offset: preadv(fd, [parts[0][:7]], offset))
    assert get(folder, 1) == image_of(1)


def test_writing_a_page_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = opened(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda fd: pytest.fail("a page was flushed"))
    assert put(folder, 1) and get(folder, 1) == image_of(1)


@pytest.mark.parametrize("max_pages", [1, 2, 16, 17, 50])
@pytest.mark.parametrize("others", [0, 1, 50])
def test_files_that_fit_do_not_replace_each_other(tmp_path: Path, max_pages: int, others: int):
    folder = opened(tmp_path, max_pages)
    for number in range(min(others, max_pages)):
        put(folder, 1000 + number, used=number)
    count = folder.lasting_bytes // size_of(PAGE)
    assert max_pages - max_pages // 16 <= count <= max_pages
    for number in range(count):
        assert put(folder, number, used=10**9 - number)
    assert all(get(folder, number) == image_of(number) for number in range(count))


def test_a_file_under_the_name_of_another_page_is_found(tmp_path: Path):
    folder = opened(tmp_path)
    put(folder, 1)
    (path,) = stored(tmp_path)
    path.rename(path.with_name(key_of(2).hex() + ".kv"))
    assert get(opened(tmp_path), 2) is None


def test_pages_that_were_not_used_for_the_longest_time_make_room(tmp_path: Path):
    folder = opened(tmp_path, 3)
    for number in (1, 2, 3):
        put(folder, number, used=number)
    assert get(folder, 1) == image_of(1)
    put(folder, 4)
    assert [get(folder, number) is not None for number in (1, 2, 3, 4)] == [True, False, True, True]
    assert folder.size == 3 * size_of(PAGE) == sum(path.stat().st_size for path in stored(tmp_path))


def test_a_smaller_limit_deletes_pages_at_the_start_those_of_other_models_too(tmp_path: Path):
    other = opened(tmp_path, identity="b")
    put(other, 1, used=1)
    for number in (2, 3):
        put(opened(tmp_path), number, used=number)
    folder = opened(tmp_path, 2)
    assert len(stored(tmp_path)) == 2 and len(folder) == 2 and get(other, 1) is None


def test_a_page_beyond_the_limit_is_not_written(tmp_path: Path):
    folder = PageFolder(tmp_path, PAGE, PAGE, {})
    assert not put(folder, 1) and not stored(tmp_path)


def test_a_page_that_was_replaced_while_it_was_read_is_not_written(tmp_path: Path):
    folder = opened(tmp_path)
    assert not folder.write(key_of(1), memoryview(image_of(1)), is_valid=lambda: False)
    assert not stored(tmp_path) and key_of(1) not in folder


def test_files_of_others_stay(tmp_path: Path):
    folder = opened(tmp_path, 2)
    put(folder, 1, used=1)
    mine = [tmp_path / "notes.txt", stored(tmp_path)[0].with_name("x.kv"), tmp_path / "other" / "ab" / stored(tmp_path)[0].name]
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
        os.utime(path, (0, 0))
    for number in range(2, 6):
        put(folder, number)
    assert all(path.read_text() == "mine" for path in mine)


@pytest.mark.parametrize("damage", [b"", b"\0", b"x" * 16, (-1).to_bytes(8, "little", signed=True) + bytes(8)])
def test_a_damaged_size_is_counted_anew(tmp_path: Path, damage: bytes):
    folder = opened(tmp_path, 2)
    for number in (1, 2):
        put(folder, number, used=number)
    (tmp_path / LOCK).write_bytes(damage)
    put(folder, 3)
    assert folder.size == 2 * size_of(PAGE) and get(folder, 1) is None and get(folder, 3) == image_of(3)


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, pwritev = opened(tmp_path), os.pwritev

    def full(fd: int, parts: list[memoryview], offset: int) -> int:
        if offset >= HEADER_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwritev(fd, [parts[0][:7]], offset)  # short writes are no errors

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match="No space"):
        put(folder, 1)
    monkeypatch.undo()
    assert not stored(tmp_path) and not [*tmp_path.rglob("*.tmp")] and key_of(1) not in folder
    assert put(folder, 1) and get(folder, 1) == image_of(1)


def test_a_folder_that_was_deleted_is_made_again(tmp_path: Path):
    folder = opened(tmp_path / "kv" / "pages")
    put(folder, 1)
    shutil.rmtree(tmp_path / "kv")
    assert put(folder, 2) and get(folder, 2) == image_of(2) and len(folder) == 1
    assert key_of(1) not in folder and put(folder, 1) and get(folder, 1) == image_of(1)
    shutil.rmtree(tmp_path / "kv")
    assert put(folder, 2) and put(folder, 1)  # pages that the folder had
    assert folder.size == 2 * size_of(PAGE) and len([*tmp_path.rglob("about.json")]) == 1
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "kv", tmp_path / "kv" / "pages")] == [0o700, 0o700]


class KilledError(BaseException):
    """The process was killed."""


class Power:
    """Lets the process end at one of its calls of the system: from then on no call does anything, but for closing files."""

    def __init__(self, last: int) -> None:
        self.left = last
        self.opened = set[int]()
        self._open, self._close = os.open, os.close

    def open(self, *args, **kwargs) -> int:
        fd = self._open(*args, **kwargs)
        self.opened.add(fd)
        return fd

    def close(self, fd: int) -> None:
        self.opened.discard(fd)
        self._close(fd)

    def guard(self, call):
        def guarded(*args, **kwargs):
            self.left -= 1
            if self.left < 0:
                raise KilledError
            return call(*args, **kwargs)

        return guarded


@contextmanager
def killed_after(count: int, patch: pytest.MonkeyPatch) -> Iterator[Power]:
    power = Power(count)
    with patch.context() as patched:
        patched.setattr(os, "open", power.open)
        patched.setattr(os, "close", power.close)
        for name in CALLS:
            patched.setattr(os, name, power.guard(getattr(os, name)))
        yield power
    for fd in power.opened:  # the system closes the files of a process that ended, which gives up their locks
        os.close(fd)


def work(path: Path) -> None:
    """A process that makes a folder, fills it beyond its limit, reads a page, finds a damaged one and deletes another."""
    folder = opened(path, 3)
    for number in range(5):
        put(folder, number, used=number)
    get(folder, 4)
    with open(stored(path)[-1], "r+b") as file:
        file.truncate(10)
    get(folder, 4)
    folder.discard(key_of(3))
    put(folder, 6)


def test_a_process_that_is_killed_at_any_call_of_the_system_leaves_whole_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "ABANDONED", -1.0)
    last = 0
    while True:
        path = tmp_path / str(last)
        with killed_after(last, monkeypatch) as power:
            with suppress(KilledError):
                work(path)
            if power.left >= 0:
                break
        after = opened(path, 3)
        assert not [*path.rglob("*.tmp")], f"call {last}: a temporary file stayed"
        for number in range(7):
            assert get(after, number) in (None, image_of(number)), f"call {last}: page {number} is wrong"
            assert number == 4 or (key_of(number) in after) == (get(after, number) is not None), f"call {last}: page {number} was lost"
        for number in range(10, 15):
            assert put(after, number)
        used = sum(file.stat().st_size for file in stored(path))
        assert used <= after.size <= after.max_bytes, f"call {last}: {used} bytes are used, {after.size} are counted"
        assert get(after, 14) == image_of(14)
        last += 1
    assert last > 60


PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from tests.executor.test_page_folder import get, image_of, opened, put
folder = opened(Path({folder!r}), 6)
for turn in range(40):
    number = (turn * {step}) % 13
    put(folder, number)
    assert get(folder, number) in (None, image_of(number))
"""


def test_processes_share_a_folder(tmp_path: Path):
    root = str(Path(__file__).parents[2])
    programs = [PROGRAM.format(tests=root, folder=str(tmp_path), step=step) for step in (1, 3)]
    both = [subprocess.Popen([sys.executable, "-c", program]) for program in programs]
    assert [process.wait(120) for process in both] == [0, 0]
    folder = opened(tmp_path, 6)
    assert sum(path.stat().st_size for path in stored(tmp_path)) == folder.size <= folder.max_bytes
    assert all(get(folder, number) in (None, image_of(number)) for number in range(13)) and len(folder)


def test_threads_share_a_folder(tmp_path: Path):
    folder, failed = opened(tmp_path, 4), list[BaseException]()

    def run(step: int) -> None:
        try:
            for turn in range(60):
                number = (turn * step) % 11
                put(folder, number)
                assert get(folder, number) in (None, image_of(number))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(step,)) for step in (1, 2, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert sum(path.stat().st_size for path in stored(tmp_path)) <= folder.size <= folder.max_bytes


@settings(max_examples=60, deadline=None)
@given(moves=st.lists(st.tuples(st.sampled_from(["put", "get", "flip", "lose", "open", "other"]), st.integers(0, 6)), max_size=30))
def test_any_sequence_of_calls_returns_only_what_was_written(moves, tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("kv")
    folder, other = opened(path, 4), opened(path, 4)
    for move, number in moves:
        there = [file for file in stored(path) if file.stem == key_of(number).hex()]
        match move:
            case "put":
                put(folder, number)
            case "other":
                put(other, number)
            case "get":
                assert get(folder, number) in (None, image_of(number))
            case "flip":
                for file in there:
                    data = bytearray(file.read_bytes())
                    data[number * 17 % len(data)] ^= 4
                    file.write_bytes(data)
            case "lose":
                for file in there:
                    file.unlink()
            case "open":
                folder = opened(path, 4)
        assert sum(file.stat().st_size for file in stored(path)) <= folder.max_bytes


def test_a_note_that_is_a_pipe_is_none_and_nobody_waits_for_it(tmp_path: Path):
    folder = opened(tmp_path)
    folder.note("rates.json", 2.0)
    (note,) = tmp_path.rglob("rates.json")
    note.unlink()
    os.mkfifo(note)
    assert folder.about("rates.json") is None
    folder.note("rates.json", 3.0)
    assert folder.about("rates.json") == 3.0


def test_reads_are_measured_and_the_measured_pages_are_deleted(tmp_path: Path):
    folder = opened(tmp_path)
    assert folder.measure(3, 2) > 0
    assert not stored(tmp_path) and len(folder) == 0 and folder.size == 0
    folder.note("rates.json", {"bytes_per_second": 2.0})
    assert opened(tmp_path).about("rates.json") == {"bytes_per_second": 2.0} and folder.about("other.json") is None
