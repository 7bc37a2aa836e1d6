"""Kernels compiled ahead: what a rehearsal notes, what it leaves as it was, and when none is needed. Triton itself needs a GPU."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from threading import Event, Thread, get_ident
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanovllm.ops.compile_ahead import FirstStart, noted

triton = pytest.importorskip("triton")
knobs = pytest.importorskip("triton.knobs")


class Kernel:
    """Stands for a kernel: `launch` does what Triton does when no compiled kernel is loaded."""

    def __init__(self, name: str, fails: bool = False) -> None:
        self.name, self.fails, self.loaded, self.launched = name, fails, list[str](), 0

    def launch(self, key: str) -> None:
        hook: Callable[..., Any] | None = knobs.runtime.jit_cache_hook
        about = SimpleNamespace(module="here", name=self.name, jit_function=self)
        if hook is None or not hook(key=key, repr="", fn=about, compile={"specialization_data": key}, is_manual_warmup=False):
            self.launched += 1

    def preload(self, data: str) -> "Compiled":
        if self.fails:
            raise RuntimeError("does not compile")
        return Compiled(self.loaded, data)


class Compiled:
    """Stands for a compiled kernel. Triton builds what launches it, and loads it, when `run` is read."""

    src = metadata = None

    def __init__(self, loaded: list[str], data: str) -> None:
        self._loaded, self._data = loaded, data

    @property
    def run(self) -> Callable[..., None]:
        self._loaded.append(self._data)
        return lambda *args: None


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., FirstStart]:
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "triton"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="a GPU"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    launchers = SimpleNamespace(launcher_cls=lambda src, metadata: None)
    monkeypatch.setattr("triton.runtime.driver", SimpleNamespace(active=launchers))
    return lambda *properties: FirstStart(torch.device("cuda"), *properties)


def test_a_rehearsal_compiles_each_kernel_once_and_launches_none(first: Callable[..., FirstStart]) -> None:
    one, two, broken = Kernel("one"), Kernel("two"), Kernel("broken", fails=True)

    def start() -> None:
        for key in ("a", "b", "a"):
            one.launch(key)
        broken.launch("a")
        two.launch("a")
        raise ValueError("garbage")  # is raised again by the real start

    first(1).rehearse(start)
    assert sorted(one.loaded) == ["a", "b"] and two.loaded == ["a"] and not broken.loaded
    assert not one.launched + two.launched + broken.launched
    one.launch("c")
    assert one.launched == 1 and knobs.runtime.jit_cache_hook is None


def test_kernels_are_built_in_threads_and_loaded_in_one(first: Callable[..., FirstStart], monkeypatch: pytest.MonkeyPatch) -> None:
    """What launches a kernel may be another kernel's if two threads load at the same time. In threads it is built and thrown away."""
    built, loaded = list[int](), list[int]()
    launchers = SimpleNamespace(launcher_cls=lambda src, metadata: built.append(get_ident()))
    monkeypatch.setattr("triton.runtime.driver", SimpleNamespace(active=launchers))
    monkeypatch.setattr(Compiled, "run", property(lambda self: loaded.append(get_ident())))
    kernel = Kernel("one")
    first(1).rehearse(lambda: [kernel.launch(key) for key in "abcdef"] and None)
    assert loaded == [get_ident()] * 6
    assert len(built) == 6 and get_ident() not in built


def test_other_threads_launch_during_a_rehearsal(first: Callable[..., FirstStart]) -> None:
    mine, theirs = Kernel("mine"), Kernel("theirs")

    def start() -> None:
        mine.launch("a")
        other = Thread(target=theirs.launch, args=("a",))
        other.start()
        other.join()

    first(1).rehearse(start)
    assert mine.loaded == ["a"] and not mine.launched
    assert theirs.launched == 1 and not theirs.loaded


def test_a_start_that_was_completed_is_not_rehearsed_again(first: Callable[..., FirstStart], tmp_path: Path) -> None:
    kernel = Kernel("one")
    first("small", 256).completed()
    assert len([*(tmp_path / "triton").iterdir()]) == 1
    first("small", 256).rehearse(lambda: kernel.launch("a"))
    assert not kernel.loaded and not kernel.launched
    first("large", 256).rehearse(lambda: kernel.launch("a"))
    assert kernel.loaded == ["a"]
    nothing = FirstStart(None, "small")
    nothing.rehearse(lambda: kernel.launch("b"))
    nothing.completed()
    assert kernel.loaded == ["a"] and len([*(tmp_path / "triton").iterdir()]) == 1


def test_overlapping_rehearsals_leave_nothing_behind() -> None:
    kernel, inside, leave = Kernel("one"), Event(), Event()

    def other() -> None:
        with noted():
            inside.set()
            assert leave.wait(120)

    thread = Thread(target=other)
    with noted() as kernels:
        thread.start()
        assert inside.wait(120)
        kernel.launch("a")
    leave.set()
    thread.join()
    assert [data for _, data in kernels] == ["a"] and not kernel.launched
    kernel.launch("b")
    assert kernel.launched == 1


def test_the_hook_that_was_there_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **given: bool(calls.append(given["key"])))
    with pytest.raises(ValueError), noted():
        raise ValueError
    kernel = Kernel("one")
    kernel.launch("a")
    assert calls == ["a"] and kernel.launched == 1
