"""Build and load the package's C code. The library is built once per machine and kept in the user's cache for later processes."""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from nanovllm.files import cache_folder, is_private

# Copies of loops for each outcome of a condition would double the compiler's time, and no kernel was faster with them.
# Sums of products are contracted where the code says so: elsewhere compilers do it in one function and not in another.
BASE = ("-O3", "-fno-unswitch-loops", "-ffp-contract=off", "-fPIC", "-std=gnu11")
TIMEOUT = 120.0  # seconds a compiler may take


class BuildError(Exception):
    """The C code could not be built or loaded; the message contains the compiler's output."""


@functools.cache
def library(source: Path, symbols: tuple[str, ...], flags: tuple[str, ...] = ()) -> ctypes.CDLL | None:
    """Return the library built from a C file and the headers in its folder, or None with a warning if it cannot be built.

    The compiler is `CC`, cc, gcc or clang. The library is kept in `$XDG_CACHE_HOME/nanovllm` (default `~/.cache/nanovllm`) under a hash of
    the source, the compiler and this processor. A file in the cache that does not load is built again. If the cache folder is not
    writable, or other users can write to it, a library in the temporary directory serves this process.

    Args:
        source: The C file.
        symbols: Names of functions that the library must have.
        flags: Flags of the compiler that this file needs.
    """
    compiler = find_compiler()
    if compiler is None:
        wanted = (
            f"CC={os.environ['CC']!r} is not an executable program; set CC to a C compiler or unset it"
            if os.environ.get("CC")
            else "found no C compiler (cc, gcc or clang); install one, or set CC"
        )
        warnings.warn(f"{wanted}: decoding on the CPU is several times slower than it could be", stacklevel=2)
        return None
    name = f"{source.stem}-{_key(source, compiler, flags)}.so"
    try:
        target = cache_folder() / name
        if target.exists() and is_private(target):
            try:
                return _load(target, symbols)
            except BuildError:
                target.unlink()
        return build(compiler, source, target, symbols, flags)
    except OSError:
        with tempfile.TemporaryDirectory() as folder:  # after loading, the file may be deleted
            return _built(compiler, source, Path(folder) / name, symbols, flags)
    except BuildError as error:
        return _warned(error)


def find_compiler() -> str | None:
    """Return the path of the C compiler, or None. If `CC` is set, no other compiler is considered."""
    names = (os.environ["CC"],) if os.environ.get("CC") else ("cc", "gcc", "clang")
    return next(filter(None, map(shutil.which, names)), None)


def build(compiler: str, source: Path, target: Path, symbols: tuple[str, ...], flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Compile `source` to `target`, which appears complete or not at all, and only if it loads. Raises `BuildError`, `OSError`."""
    output = ""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made, objects = Path(folder) / target.name, str(Path(folder) / "kernels.o")
        for wanted, openmp in _attempts():
            commands = ([*BASE, *flags, *wanted, "-c", str(source), "-o", objects], ["-shared", objects, *openmp, "-lm", "-o", str(made)])
            output = next(filter(None, (_errors([compiler, *command]) for command in commands)), "")
            if output:
                continue
            try:
                loaded = _load(made, symbols)
            except BuildError as error:
                output = str(error)
                continue
            made.chmod(0o700)  # a linker obeys the umask, and a library that others can write is not loaded again
            with made.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(made, target)
            if not openmp:
                warnings.warn(f"{compiler} has no OpenMP: decoding on the CPU runs in one thread", stacklevel=3)
            return loaded
    raise BuildError(f"{source.name} could not be built by {compiler}: {output.strip()[-500:] or 'the compiler gave no reason'}")


def _built(compiler: str, source: Path, target: Path, symbols: tuple[str, ...], flags: tuple[str, ...]) -> ctypes.CDLL | None:
    try:
        return build(compiler, source, target, symbols, flags)
    except (BuildError, OSError) as error:
        return _warned(error)


def _warned(error: Exception) -> None:
    warnings.warn(f"{error}; decoding on the CPU is several times slower than it could be", stacklevel=3)


def _attempts() -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return flags for compiling and for linking, the best first.

    PyTorch's own OpenMP library is linked if PyTorch ships one: two OpenMP libraries would each keep a pool of waiting threads.
    """
    native, bundled = ("-march=native",), tuple(map(str, sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))[:1]))
    parallel: list[tuple[str, ...]] = [bundled] if bundled else []
    own: tuple[str, ...] = ("-fopenmp",)
    return [*(((*native, *own), link) for link in (*parallel, own)), (own, own), (native, ()), ((), ())]


def _errors(command: Sequence[str]) -> str:
    """Run a command and return its error output, or an empty string if it succeeds.

    Raises `BuildError` if the command is killed or times out: other flags would not help then.
    """
    try:
        # A new session, so that Ctrl-C in the terminal does not look like a failure of the compiler.
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=TIMEOUT, check=False,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} timed out after {TIMEOUT:g} seconds") from error
    if done.returncode < 0:
        raise BuildError(f"{command[0]} was killed by signal {-done.returncode}")
    return "" if done.returncode == 0 else done.stderr or f"exit status {done.returncode}"


def _load(file: Path, symbols: tuple[str, ...]) -> ctypes.CDLL:
    if file.stat().st_size < 1024:  # a truncated file could kill the process when it is mapped
        raise BuildError(f"{file} is truncated")
    try:
        loaded = ctypes.CDLL(str(file))
        for symbol in symbols:
            getattr(loaded, symbol)
    except (OSError, AttributeError) as error:
        raise BuildError(f"{file} does not load: {error}") from error
    return loaded


def _key(source: Path, compiler: str, flags: tuple[str, ...]) -> str:
    processor = platform.processor()
    if Path("/proc/cpuinfo").exists():  # machines with different instruction sets may share a home directory
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        processor = next((line for line in lines if line.lower().startswith(("flags", "features"))), processor)
    files = [source, *sorted(source.parent.glob("*.h"))]
    program = Path(compiler).resolve()
    made = program.stat()
    parts = (
        *(file.read_text(encoding="utf-8") for file in files), str(program), f"{made.st_mtime_ns} {made.st_size}", torch.__version__,
        torch.__file__, platform.machine(), processor, repr((BASE, flags, _attempts())),
    )  # fmt: skip
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
