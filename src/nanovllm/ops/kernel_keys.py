"""The keys by which Triton finds compiled kernels on the disk, made in one order, so that every process makes the same ones.

The key of a kernel has the constants of the functions that it calls, but in Triton 3.7 and before only of those whose own key was made
earlier (triton-lang/triton#10494). Threads that compile kernels at a first start made other keys than the second start, which launches one
kernel after the other. So the second start compiled a part of them once more.
"""

from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from pathlib import Path

OPS = Path(__file__).parent


def kernel_files() -> list[Path]:
    """The files of all Triton kernels, in a fixed order."""
    return sorted(OPS.rglob("triton_*.py"))


def hash_kernels() -> None:
    """Make the keys of all Triton functions of this package, in a fixed order. Called before the first launch; later calls take no time.

    A file that cannot be imported with this version of Triton is left out, as is a function that has no key. The launch explains why.
    """
    from triton import JITFunction  # not installed everywhere

    for file in kernel_files():
        for function in _defined(file):
            if isinstance(function, JITFunction):  # the interpreter has others, without keys
                try:
                    _ = function.cache_key  # is kept
                except Exception:
                    function.hash = None  # Triton leaves the beginning of a key


def _defined(file: Path) -> Iterable[object]:
    """What a file of kernels defines and imports."""
    with suppress(Exception):
        return vars(import_module(".".join((__package__ or "", *file.relative_to(OPS).with_suffix("").parts)))).values()
    return ()
