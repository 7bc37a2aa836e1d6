"""FlashInfer's batch attention over our pages: make its schedules, send them to the device and launch its kernels.

This file and `flashinfer_build.py` are written for flashinfer-python 0.6.14, and no other file imports it. This one calls the two
functions that FlashInfer's `BatchPrefillWithPagedKVCacheWrapper` calls in the end. The wrapper itself is not used: its `plan` walks the
batch in Python, and its buffers cannot alternate.

**Windows.** A schedule that splits rows depends on the number of parts of each row, which depends on the window. The kernel counts the
parts again when it runs, and uses the count to place the parts of a row's second query. With another window the places would be wrong. So
layers of each window have a schedule of their own, over the same index arrays. If the lengths are known and no row is longer than a
window, the schedule without a window is used. The kernels for Hopper split no row, so one schedule serves all windows.

**Order.** All work of plans that share a workspace must go to one stream. An update writes pinned memory, which asynchronous copies read.
So each plan alternates between two sets of pinned memory, and waits only if the host is two updates ahead of the device.
"""

from typing import Any, NamedTuple

import torch

from nanovllm.ops.attention.flashinfer_build import Kernels, load
from nanovllm.ops.attention.plan_table import PlanMismatchError, register
from nanovllm.ops.backends import attention_backend
from nanovllm.types import Tensor

NON_CAUSAL, CAUSAL = 0, 1  # flashinfer.utils.MaskMode
NHD, HND = 0, 1  # flashinfer.utils.TensorLayout
EVERYTHING = 1 << 30  # window without a limit: the kernels for Hopper with windows do not treat -1 as unlimited


def num_tiles(num_tokens: int, num_rows: int, num_heads: int, num_kv_heads: int, tile: int, device: torch.device) -> int:
    """Return the number of query tiles that FlashInfer reserves for a captured schedule.

    It is at least two thread blocks per multiprocessor, divided by the key/value heads, and at least the number of query tiles.
    """
    blocks = 2 * torch.cuda.get_device_properties(device).multi_processor_count // num_kv_heads
    return max(blocks, -(-num_tokens * (num_heads // num_kv_heads) // tile) + num_rows - 1)


class AttentionWorkspace:
    """Scratch memory for partial results, shared by all plans of one stream, for batches of up to `max_rows` rows."""

    def __init__(self, max_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device) -> None:
        tile_bytes = num_heads * (head_dim + 1) * 4
        tile = 16 if num_heads <= 16 * num_kv_heads else 64  # FA2DetermineCtaTileQ
        decode = num_tiles(max_rows, max_rows, num_heads, num_kv_heads, tile, device) * tile * tile_bytes
        prefill = num_tiles(0, 1, num_heads, num_kv_heads, 128, device) * 128 * tile_bytes
        self.buffer = torch.empty(max(decode, prefill) + (1 << 20), dtype=torch.uint8, device=device)


class _Staging:
    """Pinned memory of one update, with room for several schedules. The event `copied` is done when the copies from it have run."""

    def __init__(self, num_ints: int, schedules: int, schedule_bytes: int) -> None:
        self.ints = torch.empty(num_ints, dtype=torch.int32, pin_memory=True)
        self.schedules = torch.empty(schedules, schedule_bytes, dtype=torch.uint8, pin_memory=True).unbind()
        self.copied = torch.cuda.Event()


class _Schedule(NamedTuple):
    """The schedule for layers of one window: its memory, its layout, and how many keys before its own a query attends to (-1: all)."""

    memory: Tensor
    info: Any
    window_left: int


class FlashInferPlan:
    """The common part of plans for decode batches and for prompts: FlashInfer's schedules, index arrays and their pinned copies."""

    def __init__(
        self,
        workspace: AttentionWorkspace,
        num_ints: int,
        schedule_bytes: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        windows: tuple[int, ...],
        softcap: float,
    ) -> None:
        if attention_backend(device, dtype, head_dim, page_size) != "flashinfer":
            raise PlanMismatchError(f"FlashInfer does not support {dtype}, head_dim={head_dim}, page_size={page_size} on {device}")
        self.workspace, self.dtype, self.head_dim, self.page_size = workspace, dtype, head_dim, page_size
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.windows, self.softcap = tuple(dict.fromkeys(windows)), softcap
        if not windows or min(windows) < 0 or softcap < 0:
            raise PlanMismatchError(f"windows {windows} must be non-empty, each at least 0, and the soft cap {softcap} at least 0")
        self.ints = torch.zeros(num_ints, dtype=torch.int32, device=device)
        self.memory = torch.empty(len(self.windows), schedule_bytes, dtype=torch.uint8, device=device).unbind()
        sizes = num_ints, len(self.windows), schedule_bytes
        self.staging = (_Staging(*sizes), _Staging(*sizes))
        self.schedules: dict[int, _Schedule] = {}  # window -> schedule; empty before the first update
        self.pdl = torch.cuda.get_device_capability(device) >= (9, 0)
        self.modules: dict[str, Any] = {}
        self.load("fa2")
        self.handle = register(self)

    def load(self, backend: str) -> None:
        """Load kernels, with windows and soft caps if the plan has any. They are built first if this machine has never done so."""
        self.modules[backend] = load(Kernels(backend, self.dtype, self.head_dim, any(self.windows), self.softcap > 0))

    def next_staging(self) -> _Staging:
        self.staging = self.staging[::-1]
        self.staging[0].copied.synchronize()
        return self.staging[0]

    def commit(
        self, staging: _Staging, backend: str, used: int, qo_indptr, kv_indptr, kv_lens, num_tokens: int, captured: bool, causal: bool,
        page_size: int | None = None, longest: int | None = None,
    ) -> None:  # fmt: skip
        """Send the staged arrays and then the schedules, whose layout is the same for any captured batch.

        No row is longer than `longest`; None means that rows will grow.
        """
        self.ints[:used].copy_(staging.ints[:used], non_blocking=True)
        made: dict[int, tuple[Tensor, Any]] = {}
        for window in self.windows:
            window_left = window - 1 if window and (longest is None or window < longest) else -1
            split = window_left if backend == "fa2" else -1  # the schedule of fa3 does not depend on the window
            if split not in made:
                memory = self.memory[len(made)]
                info = self.modules[backend].plan(
                    self.workspace.buffer,
                    memory,
                    staging.schedules[len(made)],
                    torch.from_numpy(qo_indptr),
                    torch.from_numpy(kv_indptr),
                    torch.from_numpy(kv_lens),
                    num_tokens,
                    len(qo_indptr) - 1,
                    self.num_heads,
                    self.num_kv_heads,
                    self.page_size if page_size is None else page_size,
                    captured,
                    self.head_dim,
                    self.head_dim,
                    causal,
                    split,
                    *((-1, False, 0) if backend == "fa2" else ()),  # fixed_split_size, disable_split_kv, num_colocated_ctas
                )
                made[split] = memory, info
            if window_left < 0 and backend == "fa3" and any(self.windows):
                window_left = EVERYTHING
            self.schedules[window] = _Schedule(*made[split], window_left)
        staging.copied.record()

    def follow(self, window: int, softcap: float) -> _Schedule:
        """Return the schedule of layers with this window. Raises `PlanMismatchError` if the plan is for other windows or soft caps."""
        if window not in self.schedules or softcap != self.softcap:
            raise PlanMismatchError(
                f"the plan does not fit a layer of window {window} and soft cap {softcap}: it is for {self.windows} and {self.softcap}"
            )
        return self.schedules[window]

    def launch(self, backend, schedule: _Schedule, q, kv, arrays, out, mask, scale, pdl, lse=None, layout=HND) -> None:
        """Launch the attention kernel.

        `kv` are keys and values in pages, `[N, K, S, D]` each, with their index arrays. In layout NHD they are rows `[T, K, D]` with the
        bounds of each sequence.
        """
        module, paged = self.modules[backend], layout == HND
        (module.paged_run if paged else module.ragged_run)(
            self.workspace.buffer,
            schedule.memory,
            schedule.info,
            q,
            *kv,
            *arrays,
            out,
            lse,  # in base 2
            mask,
            layout,
            schedule.window_left,
            pdl,
            *(None,) * 6,  # masks, slopes, multi-item scoring
            self.softcap,
            scale,
            *(None,) * (3 if paged else 0),  # scales of 8-bit inputs
            1.0,  # rope_scale
            1e4,  # rope_theta
            0,  # token_pos_in_items_len
            *((self.workspace.buffer.numel(),) if paged else ()),
        )
