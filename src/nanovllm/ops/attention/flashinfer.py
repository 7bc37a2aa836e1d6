"""FlashInfer's batch attention over our pages: how its schedules are made and sent, and its kernels launched.

Written against flashinfer-python 0.6.14, which is imported only here. The functions called are the two that its
`BatchPrefillWithPagedKVCacheWrapper` ends in: the wrapper's own `plan` walks the batch in Python, and its buffers cannot be alternated.

**Windows.** A schedule that splits rows knows how many parts a row has, which depends on the window. The kernel counts them anew when it
runs, and puts the parts of a row's second query behind so many: of another window it would put them elsewhere. So layers of each window
follow a schedule of their own, over the same index arrays. A window that no row outgrows is none, where lengths are known; Hopper's kernels
split no row, and one schedule serves them all.

**Order.** All work of plans that share a workspace goes to one stream. An update writes pinned memory that asynchronous copies read, so
each plan alternates between two sets of it, and waits only when the host is two updates ahead of the device.
"""

from typing import Any, NamedTuple

import torch

from nanovllm.ops.attention.plan_table import PlanMismatchError, register
from nanovllm.ops.backends import attention_backend
from nanovllm.types import Tensor

NON_CAUSAL, CAUSAL = 0, 1  # flashinfer.utils.MaskMode
NHD, HND = 0, 1  # flashinfer.utils.TensorLayout
EVERYTHING = 1 << 30  # keys before a query's own; kernels of Hopper that are built for windows take -1 for a number


def num_tiles(num_tokens: int, num_rows: int, num_heads: int, num_kv_heads: int, tile: int, device: torch.device) -> int:
    """Thread-block rows that FlashInfer reserves for a captured schedule: two blocks a multiprocessor, or a tile for every query tile."""
    blocks = 2 * torch.cuda.get_device_properties(device).multi_processor_count // num_kv_heads
    return max(blocks, -(-num_tokens * (num_heads // num_kv_heads) // tile) + num_rows - 1)


class AttentionWorkspace:
    """Scratch memory for partial results, shared by all plans of one stream. Sizes: the largest batch, and the model's heads."""

    def __init__(self, max_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device) -> None:
        tile_bytes = num_heads * (head_dim + 1) * 4
        tile = 16 if num_heads <= 16 * num_kv_heads else 64  # FA2DetermineCtaTileQ
        decode = num_tiles(max_rows, max_rows, num_heads, num_kv_heads, tile, device) * tile * tile_bytes
        prefill = num_tiles(0, 1, num_heads, num_kv_heads, 128, device) * 128 * tile_bytes
        self.buffer = torch.empty(max(decode, prefill) + (1 << 20), dtype=torch.uint8, device=device)


class _Staging:
    """Pinned memory of one update, with room for several schedules. `copied` has passed when the copies out of it have run."""

    def __init__(self, num_ints: int, schedules: int, schedule_bytes: int) -> None:
        self.ints = torch.empty(num_ints, dtype=torch.int32, pin_memory=True)
        self.schedules = torch.empty(schedules, schedule_bytes, dtype=torch.uint8, pin_memory=True).unbind()
        self.copied = torch.cuda.Event()


class _Schedule(NamedTuple):
    """What layers of one window follow: the schedule, where its parts lie, and how many keys before its own a query sees (-1: all)."""

    memory: Tensor
    info: Any
    window_left: int


class FlashInferPlan:
    """What plans of decode batches and of prompts share: FlashInfer's schedules, the index arrays, and their pinned sources."""

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
            raise PlanMismatchError(f"no FlashInfer attention for {dtype}, head_dim={head_dim}, page_size={page_size} on {device}")
        self.workspace, self.dtype, self.head_dim, self.page_size = workspace, dtype, head_dim, page_size
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.windows, self.softcap = tuple(dict.fromkeys(windows)), softcap
        if not windows or min(windows) < 0 or softcap < 0:
            raise PlanMismatchError(f"windows {windows} must be some, each at least 0, and the soft cap {softcap} at least 0")
        self.ints = torch.zeros(num_ints, dtype=torch.int32, device=device)
        self.memory = torch.empty(len(self.windows), schedule_bytes, dtype=torch.uint8, device=device).unbind()
        sizes = num_ints, len(self.windows), schedule_bytes
        self.staging = (_Staging(*sizes), _Staging(*sizes))
        self.schedules: dict[int, _Schedule] = {}  # by window; none before the first update
        self.pdl = torch.cuda.get_device_capability(device) >= (9, 0)
        self.modules: dict[str, Any] = {}
        self.load("fa2")
        self.handle = register(self)

    def load(self, backend: str) -> None:
        """Load kernels, those for windows and soft caps where the plan has such. The first time for a dtype, a head_dim and the two
        builds them: fa2 30 to 45 s, fa3 90 to 110; they stay on disk."""
        from flashinfer.prefill import get_batch_prefill_module

        dtypes, limits = (self.dtype, self.dtype, self.dtype, torch.int32), (any(self.windows), self.softcap > 0)
        self.modules[backend] = get_batch_prefill_module(backend, *dtypes, self.head_dim, self.head_dim, 0, *limits, False)

    def next_staging(self) -> _Staging:
        self.staging = self.staging[::-1]
        self.staging[0].copied.synchronize()
        return self.staging[0]

    def commit(
        self, staging: _Staging, backend: str, used: int, qo_indptr, kv_indptr, kv_lens, num_tokens: int, captured: bool, causal: bool,
        page_size: int | None = None, longest: int | None = None,
    ) -> None:  # fmt: skip
        """Send the staged arrays, then the schedules; where their parts lie is the same for any captured batch. `longest`: no row is
        longer; None: rows grow."""
        self.ints[:used].copy_(staging.ints[:used], non_blocking=True)
        made: dict[int, tuple[Tensor, Any]] = {}
        for window in self.windows:
            window_left = window - 1 if window and (longest is None or window < longest) else -1
            split = window_left if backend == "fa2" else -1  # what the schedule depends on
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
        """The schedule of layers with this window. Raises `PlanMismatchError` for a window or a soft cap that the plan was not made for."""
        if window not in self.schedules or softcap != self.softcap:
            raise PlanMismatchError(
                f"a layer of window {window} and soft cap {softcap} was given to a plan for {self.windows} and {self.softcap}"
            )
        return self.schedules[window]

    def launch(self, backend, schedule: _Schedule, q, kv, arrays, out, mask, scale, pdl, lse=None, layout=HND) -> None:
        """`kv` are pages, `[N, K, S, D]` each, with the arrays that find them; or in layout NHD rows `[T, K, D]` with their bounds."""
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
