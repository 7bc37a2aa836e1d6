"""The keys by which Triton finds compiled kernels on the disk, made in one order, so that every process makes the same ones.

The key of a kernel has the constants of the functions that it calls, but in Triton 3.7 and before only of those whose own key was made
earlier (triton-lang/triton#10494). Threads that compile kernels at a first start made other keys than the second start, which launches one
kernel after the other. So the second start compiled a part of them once more.
"""

from contextlib import suppress
from importlib import import_module
from pathlib import Path

OPS = Path(__file__).parent


def kernel_files() -> list[Path]:
    """The files of all Triton kernels, in a fixed order."""
    return sorted(OPS.rglob("triton_*.py"))


def hash_kernels() -> None:
    """Make the keys of all Triton functions of this package, in a fixed order. Called before the first launch; later calls take no time.

    A file that this version of Triton does not know how to import is left out. The launch of its kernels explains why.
    """
    from triton import JITFunction  # not installed everywhere

    package = __package__ or ""
    for file in kernel_files():
        with suppress(Exception):
            for function in vars(import_module(".".join((package, *file.relative_to(OPS).with_suffix("").parts)))).values():
                if isinstance(function, JITFunction):  # the interpreter has others, without keys
                    _ = function.cache_key  # is kept
