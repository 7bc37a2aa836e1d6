"""Builds and loads the package's C code, once a machine: `build` compiles into the user's cache, where later processes find it."""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

import torch

BASE = ("-O3", "-fPIC", "-std=gnu11")
FLAGS = (("-march=native", "-fopenmp"), ("-march=native",), ())  # the first that the compiler takes
TIMEOUT = 120.0  # seconds a compiler may take


@functools.cache
def library(source: Path) -> ctypes.CDLL | None:
    """The library made of one C file; None where there is no compiler (`CC`, cc, gcc or clang), or, with a warning, where it fails.

    It lies in `$XDG_CACHE_HOME/nanovllm` (default `~/.cache/nanovllm`) under a hash of the source, the compiler and this processor.
    """
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", ""), "cc", "gcc", "clang"))), None)
    if compiler is None:
        return None
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanovllm"
        target = cache / f"{source.stem}-{_key(source, compiler)}.so"
        if not target.exists():
            cache.mkdir(parents=True, exist_ok=True)
            build(compiler, source, target)
        return ctypes.CDLL(str(target))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        warnings.warn(f"{source.name} could not be built, decoding on the CPU is slower: {error}", stacklevel=2)
        return None


def build(compiler: str, source: Path, target: Path) -> None:
    """Compile `source` to `target`, which appears whole or not at all. Raises `RuntimeError` with the compiler's words."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made, objects, said = str(Path(folder) / target.name), str(Path(folder) / "kernels.o"), ""
        for flags in FLAGS:
            # PyTorch's own OpenMP library is linked where it brings one: two would keep a pool of waiting threads each.
            openmp = (_torch_openmp() or ["-fopenmp"]) if "-fopenmp" in flags else []
            for command in ([*BASE, *flags, "-c", str(source), "-o", objects], ["-shared", objects, *openmp, "-lm", "-o", made]):
                done = _run([compiler, *command])
                said = done.stderr
                if done.returncode:
                    break
            else:
                os.replace(made, target)
                return
    raise RuntimeError(f"{compiler}: {said.strip()[-500:]}")


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False, stdin=subprocess.DEVNULL)


def _torch_openmp() -> list[str]:
    return [str(path) for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))][:1]


def _key(source: Path, compiler: str) -> str:
    processor = platform.processor()
    if Path("/proc/cpuinfo").exists():  # home directories are shared between machines: their instruction sets differ
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line for line in lines if line.lower().startswith(("flags", "features"))), processor)
    parts = (source.read_text(), compiler, torch.__version__, torch.__file__, platform.machine(), processor, repr((BASE, FLAGS)))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
