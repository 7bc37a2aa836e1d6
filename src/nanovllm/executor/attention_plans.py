"""The attention plans of one engine: which kernels serve its model, which batches share pages, and the memory that all plans share.

FlashInfer's kernels are built when they are first used on a machine, which takes one to two minutes. An engine whose decode steps run on
our own kernels, and may share pages, does not wait: until FlashInfer's kernels are there, prompts run on our own ones too.

FlashInfer knows one scale for all KV. So with KV in FP8, where each token and head has its own, our own kernels serve everything, for good.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from nanovllm.config import EngineConfig
from nanovllm.errors import NanoVLLMError
from nanovllm.executor.batch import EXTENSION, HostBatch
from nanovllm.executor.cascade_policy import CascadePolicy
from nanovllm.executor.flashinfer_loading import Loading, PlanShape, SharedPlans, shared_plans
from nanovllm.models.model import Model
from nanovllm.ops.attention.cascade_plan import Run
from nanovllm.ops.attention.flashinfer import AttentionWorkspace
from nanovllm.ops.attention.flashinfer_plans import DecodePlan, PrefillPlan
from nanovllm.ops.attention.prompt_tiles import TilePlan
from nanovllm.ops.backends import against_own_kernels, attention_backend
from nanovllm.state.kv_cache import pages_for

R = TypeVar("R")
PATIENCE = 10.0  # seconds that a start waits for FlashInfer's kernels on disk: loading them takes one or two, building them 90
BUILDING = (
    "nanovllm: FlashInfer's kernels are being built for this GPU, in one to two minutes; until then long prompts run on slower kernels"
)
FAILED = "FlashInfer's kernels could not be built or loaded; long prompts run on nanovllm's own kernels, which are slower"


class AttentionUnavailableError(NanoVLLMError):
    """FlashInfer cannot serve a model on this machine. Plain torch attention can, but is slow."""


@dataclass(frozen=True, slots=True)
class DecodePlans:
    """The attention plans of a decode batch: one for the first KV pool, and one for a second pool, of layers with a sliding window."""

    first: DecodePlan
    windowed: DecodePlan | None

    @property
    def batch_size(self) -> int:
        """The number of rows."""
        return self.first.batch_size

    @property
    def handles(self) -> tuple[int, int]:
        """The values of `Batch.plan` and `Windowed.plan`."""
        return self.first.handle, 0 if self.windowed is None else self.windowed.handle

    def update(self, host: HostBatch) -> None:
        """Plan for the pages and frames of the rows of a batch. The plans hold until the next update."""
        self.first.update(host.page_counts, host.page_tables)
        if self.windowed is not None:
            assert host.frame_tables is not None
            self.windowed.update(host.page_counts, host.frame_tables)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptPlans:
    """The plans of one batch of prompts, which no other batch uses."""

    first: PrefillPlan | TilePlan
    windowed: PrefillPlan | TilePlan | None = None

    @property
    def handles(self) -> tuple[int, int]:
        """The values of `Batch.plan` and `Windowed.plan`."""
        return self.first.handle, 0 if self.windowed is None else self.windowed.handle


class Attention:
    """The attention plans of one engine.

    Args:
        model: The model.
        limits: The engine's limits.
        policy: Decides which batches share pages. None: none.
        beside: Whether our own kernels run prompts until `load` has loaded FlashInfer's kernels, and for good if that fails. Otherwise
            the constructor waits for FlashInfer's kernels.

    Raises:
        AttentionUnavailableError: FlashInfer cannot serve the model on this machine; or, with KV in FP8, our own kernels cannot.
    """

    def __init__(self, model: Model, limits: EngineConfig, policy: CascadePolicy | None, *, beside: bool = False):
        c = model.config
        self.policy, self._own = policy, limits.kv_dtype is not None
        self._model, self._max_rows = model, limits.max_num_seqs
        self._loading: Loading | None = None
        self._tiles: list[PromptPlans] = []  # of the last batch, whose kernels may still run
        self._plans: SharedPlans | None = None
        self._second: list[PrefillPlan] = []  # for the second half of a batch: one for each KV pool
        if self._own:
            if why := against_own_kernels(model.device, model.dtype):
                raise AttentionUnavailableError(f"no kernel can serve KV in {limits.kv_dtype} on this machine: {why}")
            return
        windows = tuple(dict.fromkeys(c.windows)) or (0,)
        if attention_backend(model.device, model.dtype, c.head_dim, limits.page_size) != "flashinfer":
            raise AttentionUnavailableError(f"FlashInfer cannot serve {model.dtype} with head_dim={c.head_dim} on this machine")
        sizes = (
            pages_for(limits.max_model_len, limits.page_size), c.num_heads, c.num_kv_heads, c.head_dim, limits.page_size, model.dtype,
            model.device,
        )  # fmt: skip
        # A plan holds page tables, so the layers of each pool need their own.
        groups = ((0,), tuple(filter(None, windows))) if len(c.pool_sizes) == 2 else (windows,)
        self._shape = PlanShape(workspace=workspace_of(model, limits), sizes=sizes, groups=groups, softcap=c.attention_softcap)
        if not beside:
            self._plans = _available(partial(shared_plans, self._shape, limits.max_num_seqs))

    def load(self) -> None:
        """Start to load FlashInfer's kernels, unless they are there, or cannot serve the KV."""
        if not self._own and self._plans is None and self._loading is None:
            self._loading = Loading(self._shape.kernels(), self._model.device)

    def settle(self, *, quiet: bool = False) -> None:
        """Wait for kernels that this machine has. If they are built now, which takes longer, say so on stderr, unless `quiet`.

        Ranks that share a model wait for the end of that, too: they must take new kernels at the same step.
        """
        if self._loading is None:
            return
        if self._model.config.mesh is not None:
            wait([self._loading.backend])
            self.ready()
        elif not self._loading.builds.result() and wait([self._loading.backend], PATIENCE).done:
            self.ready()
        elif not quiet:
            print(BUILDING, file=sys.stderr, flush=True)

    def ready(self) -> bool:
        """Whether FlashInfer's kernels are there. Takes them as soon as they are. If they cannot be built, warns once."""
        if self._loading is not None and self._loading.backend.done():
            loading, self._loading = self._loading, None
            error = loading.backend.exception()
            if error is None:
                try:
                    self._shape = replace(self._shape, backend=loading.backend.result())
                    self._plans = _available(partial(shared_plans, self._shape, self._max_rows))
                except AttentionUnavailableError as unavailable:
                    error = unavailable
            if error is not None:
                warnings.warn(f"{FAILED} ({error!r})", stacklevel=2)
        return self._plans is not None

    def decode_plans(self, size: int) -> DecodePlans:
        """Return new plans for decode batches of `size` rows. Waits for FlashInfer's kernels.

        Raises:
            AttentionUnavailableError: The kernels cannot be loaded, or cannot serve the dtype of the KV.
        """
        if self._own:
            raise AttentionUnavailableError("FlashInfer cannot serve KV in FP8 with a scale for each token and head")
        make = partial(DecodePlan, self._shape.workspace, size, *self._shape.sizes)
        plans = _available(lambda: [make(windows, self._shape.softcap) for windows in self._shape.groups])
        return DecodePlans(plans[0], plans[1] if len(plans) == 2 else None)

    def prompt_plans(self, host: HostBatch, *, together: bool) -> PromptPlans:
        """Return new plans for a batch of prompts, which stay valid. Arguments are as in `plan_prompt`."""
        assert host.cu_seqlens is not None
        if not self.ready():
            return own_plans(self._model, host)
        plans = [self._shape.prompts(len(host.seq_lens), windows) for windows in self._shape.groups]
        for plan, table in zip(plans, (host.page_tables, host.frame_tables), strict=False):
            assert table is not None
            plan.update(host.cu_seqlens, host.seq_lens, table, together=together)
        return PromptPlans(first=plans[0], windowed=plans[1] if len(plans) == 2 else None)

    def shares(self, host: HostBatch) -> bool:
        """Whether a batch of prompts shares pages that `plan_prompt` would read once."""
        return self.policy is not None and self.policy.prompts(host) is not None

    def plan_prompt(self, host: HostBatch, *, together: bool) -> tuple[int, int]:
        """Plan for a batch of prompts.

        Args:
            host: The batch.
            together: Whether `paged_prefill` also gets the keys and values of the new tokens as tensors.

        Returns:
            The handles of the plans for the first KV pool and for the pool of layers with a sliding window.
        """
        assert host.cu_seqlens is not None
        if not self.ready():
            self._tiles = [own_plans(self._model, host)]
            return self._tiles[0].handles
        assert self._plans is not None
        self._tiles, windowed = [], 0
        if self._plans.windowed is not None:
            assert host.frame_tables is not None
            self._plans.windowed.update(host.cu_seqlens, host.seq_lens, host.frame_tables, together=together)
            windowed = self._plans.windowed.handle
        runs: list[Run] | None = None if self.policy is None else self.policy.prompts(host)
        if runs is not None:
            self._plans.cascade.update(host.seq_lens, host.cu_seqlens, host.page_tables, runs)
            return self._plans.cascade.handle, windowed
        self._plans.prompt.update(host.cu_seqlens, host.seq_lens, host.page_tables, together=together)
        return self._plans.prompt.handle, windowed

    def plan_halves(self, halves: Sequence[HostBatch], *, together: bool) -> list[tuple[int, int]]:
        """Plan for the two halves of a batch of prompts, whose layers take turns on one stream. Shared pages are not read once.

        Args:
            halves: The halves.
            together: As in `plan_prompt`.

        Returns:
            For each half the handles that `plan_prompt` returns.
        """
        if not self.ready():
            self._tiles = [own_plans(self._model, half) for half in halves]
            return [plans.handles for plans in self._tiles]
        assert self._plans is not None
        self._tiles = []
        self._second = self._second or [self._shape.prompts(self._max_rows, windows) for windows in self._shape.groups]
        first = [plan for plan in (self._plans.prompt, self._plans.windowed) if plan is not None]
        for half, plans in zip(halves, (first, self._second), strict=True):
            assert half.cu_seqlens is not None
            for plan, table in zip(plans, (half.page_tables, half.frame_tables), strict=False):
                assert table is not None
                plan.update(half.cu_seqlens, half.seq_lens, table, together=together)
        return [(own[0].handle, own[1].handle if len(own) == 2 else 0) for own in (first, self._second)]


def workspace_of(model: Model, limits: EngineConfig) -> AttentionWorkspace:
    """Allocate the scratch memory of FlashInfer's plans."""
    c = model.config
    return AttentionWorkspace(max(limits.max_num_seqs, EXTENSION), c.num_heads, c.num_kv_heads, c.head_dim, model.device)


def own_plans(model: Model, host: HostBatch) -> PromptPlans:
    """New plans of our own kernels for a batch of prompts. One plan serves both KV pools: page tables are not part of it."""
    assert host.cu_seqlens is not None
    c = model.config
    plan = TilePlan(len(host.seq_lens), int(host.cu_seqlens[-1]), c.num_heads, c.num_kv_heads, model.device)
    plan.update(host.cu_seqlens, host.seq_lens)
    return PromptPlans(first=plan, windowed=plan if len(c.pool_sizes) == 2 else None)


def _available(make: Callable[[], R]) -> R:
    """The result of `make`. Raises `AttentionUnavailableError` if kernels cannot be built or loaded, such as without a compiler."""
    try:
        return make()
    except (ImportError, OSError, RuntimeError) as error:
        raise AttentionUnavailableError(f"FlashInfer's kernels could not be built or loaded: {error}") from error
