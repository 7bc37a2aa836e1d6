"""KV on disk: whether an engine can have it, where its files are, and how fast they are read."""

import math
import os
import reprlib
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from nanovllm.config import Mesh, ModelConfig, RopeConfig
from nanovllm.errors import InvalidRequestError
from nanovllm.executor.distributed import agreed, least
from nanovllm.executor.kv_disk import READERS, DiskTier
from nanovllm.executor.kv_offload import HostMemory
from nanovllm.executor.page_file import DamagedPageError, size_of
from nanovllm.executor.page_folder import PageFolder
from nanovllm.files import as_path
from nanovllm.models.model import Model
from nanovllm.ops.kv_cache.fp8 import FP8
from nanovllm.state.disk_reads import DiskReads
from nanovllm.state.kv_cache import bytes_by_group
from nanovllm.state.offload import HostPages

PAGES, RATES = "pages", "rates.json"
KEYS = "blake2b-256 of namespace and tokens"  # how `state/prefix_keys.py` makes the names of files
SLOWEST = 1e6  # bytes per second, if reads cannot be measured
MEASURED = 64 << 20  # bytes that are read for the measurement, at most 16 pages


def require_kv_dir(model: Model, kv_dir: Any, kv_dir_gib: Any, num_host_pages: int) -> Path | None:
    """The folder for the KV of an engine; None if it keeps none on disk.

    Raises:
        InvalidRequestError: The options are invalid, or the model cannot have KV on disk.
    """
    number = isinstance(kv_dir_gib, int | float) and not isinstance(kv_dir_gib, bool)
    if not number or not 0 < kv_dir_gib < math.inf:
        raise InvalidRequestError(f"kv_dir_gib={reprlib.repr(kv_dir_gib)} must be a number of GiB above 0")
    if kv_dir is None:
        return None
    if not isinstance(kv_dir, str | os.PathLike) or not os.fspath(kv_dir):  # the empty name would be the current folder
        raise InvalidRequestError(f"kv_dir={reprlib.repr(kv_dir)} must be the name of a folder, or None")
    if not num_host_pages:
        raise InvalidRequestError(f"kv_dir={os.fspath(kv_dir)!r} needs host memory, through which KV goes to the disk: set host_kv_gib too")
    return as_path(kv_dir)


def require_a_page(config: ModelConfig, kv_dir_gib: int | float, page_size: int, dtype: torch.dtype) -> None:
    """Refuse a size limit that has no room for one page of each rank; frames that are apart from their pages are left out.

    Raises:
        InvalidRequestError: It has none.
    """
    page, frame = bytes_by_group(config, page_size=page_size, dtype=dtype)
    size = size_of(page or frame) * (1 if config.mesh is None else config.mesh.size)
    if int(kv_dir_gib * 2**30) < size:
        raise InvalidRequestError(f"kv_dir_gib={kv_dir_gib} is less than one page of {size / 2**30:.6f} GiB: make it larger")


def add_disk(
    model: Model, folder: Path, kv_dir_gib: float, page_size: int, memory: HostMemory, host: HostPages
) -> tuple[DiskTier, HostPages]:
    """Open the files of an engine without requests. How fast they are read is measured once for a folder and a model, and kept there.

    Each of several ranks, which call this at the same time, has files of its own with its heads. They plan with the rate of rank 0.

    Raises:
        InvalidRequestError: The folder cannot be made or read, by this or another rank.
    """
    (images, *of_frames), config, mesh = memory.images, model.config, model.config.mesh
    identity = {
        "keys": KEYS,
        "fingerprint": model.fingerprint,
        "dtype": str(model.dtype),
        "kv_dtype": str(images.dtype),
        "fp8": images.dtype == FP8,
        "image": [*images.shape[1:]],
        "page_size": page_size,
        "rope": _as_json(config.rope),
        "places": repr(config.places),
        **({"windows": [*config.windows], "frame": [*of_frames[0].shape[1:]] if of_frames else []} if config.widest_window else {}),
        **({} if config.local_rope is None else {"local_rope": _as_json(config.local_rope)}),
        **({} if mesh is None or mesh.size == 1 else {"rank": mesh.rank, "ranks": mesh.size}),
    }
    files = _opened(folder, int(kv_dir_gib * 2**30), host.bytes_of(framed=False), identity, mesh)
    rate, now = agreed(mesh, [_read_rate(files, 1 if mesh is None else mesh.size), time.perf_counter()])
    return DiskTier(files, memory), replace(host, disk=DiskReads(bytes_per_second=rate, now=now))


def _as_json(rope: RopeConfig) -> dict[str, Any]:
    """A rotary position embedding as JSON values."""
    return {name: value if isinstance(value, int | float | str) else repr(value) for name, value in asdict(rope).items()}


def _opened(folder: Path, max_bytes: int, page_bytes: int, identity: dict[str, Any], mesh: Mesh | None) -> PageFolder:
    """The files, if all ranks can open theirs. Those that can would wait for one that cannot."""
    files, failed = None, None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        files = PageFolder(folder / PAGES, max_bytes, page_bytes, identity)
    except OSError as error:
        failed = InvalidRequestError(f"kv_dir={str(folder)!r} cannot be used: {_in_the_way(folder) or error.strerror or error}")
        failed.__cause__ = error
    (opened,) = least(mesh, [int(files is not None)])
    if failed is not None:
        raise failed
    if files is None or not opened:
        raise InvalidRequestError(f"kv_dir={str(folder)!r} cannot be used by another rank of this engine")
    return files


def _in_the_way(folder: Path) -> str | None:
    """What stands where a folder is needed: on the way to `folder`, there, or in it. None if nothing does."""
    for path in (*reversed(folder.parents), folder, folder / PAGES):
        if os.path.lexists(path) and not os.path.isdir(path):
            what = "a file" if not os.path.islink(path) else "a link to a file" if os.path.exists(path) else "a link that leads nowhere"
            return f"{'it' if path == folder else repr(str(path))} is {what}, and must be a folder"
    return None


def _read_rate(files: PageFolder, num_ranks: int) -> float:
    """How many bytes are read per second: as noted before, or as measured now, by several ranks at once."""
    noted = files.about(RATES)
    if isinstance(noted, int | float) and not isinstance(noted, bool) and 0 < noted < math.inf:
        return float(noted)
    try:
        room = (files.max_bytes - files.size) // (2 * num_ranks * files.page_bytes)  # so that no page is deleted for it
        rate = files.measure(count, READERS) if (count := min(16, MEASURED // files.page_bytes, room)) > 0 else SLOWEST
        files.note(RATES, rate)
    except (OSError, DamagedPageError, RuntimeError):  # the last one if the system gives no threads
        return SLOWEST
    return rate
