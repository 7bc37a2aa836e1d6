"""Building the C code: found, kept, and done without."""

import ctypes
import os
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nanovllm.chunks.generate import generate
from nanovllm.engine.init_state import init_state
from nanovllm.executor import build_executor
from nanovllm.models.fast import cpu, path
from nanovllm.ops.cpu import build
from nanovllm.ops.sampling import cpu_sampling
from nanovllm.sampling.params import SamplingParams
from nanovllm.testing.models import random_model, tiny_config

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


def find(source: Path) -> ctypes.CDLL | None:
    return build.library.__wrapped__(source, ("answer",))


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small C file, and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "small.c"
    file.write_text("int answer(void) { return 42; }")
    return file


def built(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "nanovllm").iterdir())


@needs_compiler
def test_built_once_and_found_again(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = find(source)
    assert isinstance(library, ctypes.CDLL)
    assert library.answer() == 42
    (file,) = built(tmp_path)
    monkeypatch.setattr(build, "build", lambda *_: pytest.fail("built again"))
    assert find(source).answer() == 42
    assert built(tmp_path) == [file]


@needs_compiler
@pytest.mark.parametrize("umask", [0o002, 0o022, 0o077])
def test_a_library_is_found_again_under_any_umask(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int) -> None:
    before = os.umask(umask)
    try:
        find(source)
        (file,) = built(tmp_path)
        assert not (file.stat().st_mode | file.parent.stat().st_mode) & 0o022
        with monkeypatch.context() as patch:
            patch.setattr(build, "build", lambda *_: pytest.fail("built again"))
            assert find(source).answer() == 42
        file.chmod(0o770)  # another user may have changed it
        changed = file.stat().st_ino
        assert find(source).answer() == 42
        assert file.stat().st_ino != changed
    finally:
        os.umask(before)


@needs_compiler
def test_another_source_is_another_library(source: Path, tmp_path: Path) -> None:
    find(source)
    source.write_text("int answer(void) { return 43; }")
    assert find(source).answer() == 43
    assert len(built(tmp_path)) == 2


@needs_compiler
def test_flags_that_the_compiler_does_not_know_are_left_out(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        build, "_attempts", lambda: [(("-fno-such-flag-at-all",), ("-lno-such-library",)), (("-fno-such-flag",), ()), ((), ())]
    )
    with pytest.warns(UserWarning, match="has no OpenMP"):
        assert find(source).answer() == 42


def test_without_a_compiler_there_is_none(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    with pytest.warns(UserWarning, match="found no C compiler"):
        assert find(source) is None
    monkeypatch.setenv("CC", "/nonexistent/cc")
    with pytest.warns(UserWarning, match="/nonexistent/cc.*is not an executable program"):
        assert find(source) is None


@needs_compiler
def test_a_file_that_does_not_compile_is_a_warning_with_the_reason(source: Path, tmp_path: Path) -> None:
    source.write_text("int answer(void) { return missing; }")
    with pytest.warns(UserWarning, match=r"(?s)small\.c could not be built.*missing"):
        assert find(source) is None
    assert built(tmp_path) == []


@needs_compiler
def test_without_a_cache_folder_a_temporary_one_serves(source: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert find(source).answer() == 42


@needs_compiler
def test_a_folder_that_others_can_write_is_not_trusted(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "nanovllm"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert find(source).answer() == 42
    assert built(tmp_path) == []


@needs_compiler
@pytest.mark.parametrize("size", [0, 10, 5000])
def test_a_broken_file_in_the_cache_is_built_anew(source: Path, tmp_path: Path, size: int) -> None:
    assert find(source).answer() == 42
    (file,) = built(tmp_path)
    whole = file.read_bytes()
    file.unlink()  # the loaded one stays mapped
    file.write_bytes(whole[:size] if size < 5000 else b"x" * size)
    assert find(source).answer() == 42
    assert file.read_bytes()[:4] == b"\x7fELF"


@needs_compiler
def test_a_library_that_lacks_a_function_is_not_kept(source: Path, tmp_path: Path) -> None:
    source.write_text("int other(void) { return 1; }")
    with pytest.warns(UserWarning, match=r"(?s)small\.c could not be built.*answer"):
        assert find(source) is None
    assert built(tmp_path) == []


@needs_compiler
def test_a_compiler_that_is_killed_is_no_reason_to_build_less(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dying = tmp_path / "dying"
    dying.write_text("#!/bin/sh\nkill -INT $$\n")
    dying.chmod(dying.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(dying))
    with pytest.warns(UserWarning, match="killed by signal 2"):
        assert find(source) is None
    assert built(tmp_path) == []


@needs_compiler
def test_a_compiler_that_hangs_is_given_up(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(slow.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(slow))
    monkeypatch.setattr(build, "TIMEOUT", 0.2)
    with pytest.warns(UserWarning, match="timed out"):
        assert find(source) is None


@needs_compiler
def test_an_engine_builds_it_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request does not wait for a compiler."""
    asked = list[str]()

    def found(source: Path, symbols: tuple[str, ...], flags: tuple[str, ...] = ()) -> ctypes.CDLL | None:
        asked.append(source.name)
        return build.library(source, symbols, flags)

    for module in (build_executor, path, cpu_sampling):
        monkeypatch.setattr(module, "library", found)
    both, sampling = {"kernels.c", "sampling.c"}, {"sampling.c"}
    for architecture, quantization, built in (
        ("Qwen3ForCausalLM", "", both),
        ("Gemma3ForCausalLM", "", sampling),
        ("MixtralForCausalLM", "int8", both),
    ):
        asked.clear()
        cpu_sampling.available.cache_clear()
        model = random_model(tiny_config(architecture))
        init_state(replace(model, quantization=quantization), num_pages=8, num_frames=8 if model.config.widest_window else None)
        assert set(asked) == built, architecture


def test_the_engine_runs_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(tiny_config())
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    _, with_it = generate(model, init_state(model, num_pages=16), [1, 2, 3], params)
    monkeypatch.setattr(cpu, "library", lambda *_: None)
    _, without = generate(model, init_state(model, num_pages=16), [1, 2, 3], params)
    assert with_it.token_ids == without.token_ids


LOADED = """
from pathlib import Path
import torch
from nanovllm.models.fast import cpu
from nanovllm.ops.cpu import build
assert build.library(cpu.SOURCE, cpu.SYMBOLS) is not None
torch.ones(4).sum()
print(*{line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line})
"""


def test_torch_has_one_openmp(source: Path) -> None:
    """A second OpenMP runtime would keep a second pool of threads, which wait for work by spinning."""
    if build.library(cpu.SOURCE, cpu.SYMBOLS) is None or not Path("/proc/self/maps").exists():
        pytest.skip("no library")
    # In a process of its own: other tests load packages that bring a runtime with them.
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert any("torch" in path for path in loaded) and len([path for path in loaded if "gomp" in path]) <= 1, loaded
