"""The attention plans of one engine: which kernels serve its model, which batches share pages, and the memory that all plans share."""

from dataclasses import dataclass
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.errors import NanoVLLMError
from nanovllm.executor.batch import EXTENSION, HostBatch
from nanovllm.executor.cascade_policy import CascadePolicy
from nanovllm.models.model import Model
from nanovllm.ops.attention.cascade_plan import Run
from nanovllm.ops.attention.flashinfer import AttentionWorkspace
from nanovllm.ops.attention.flashinfer_cascade import FlashInferCascade
from nanovllm.ops.attention.flashinfer_plans import DecodePlan, PrefillPlan
from nanovllm.ops.backends import attention_backend
from nanovllm.state.kv_cache import pages_for


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

    first: PrefillPlan
    windowed: PrefillPlan | None = None

    @property
    def handles(self) -> tuple[int, int]:
        """The values of `Batch.plan` and `Windowed.plan`."""
        return self.first.handle, 0 if self.windowed is None else self.windowed.handle


class Attention:
    """The FlashInfer plans of one engine.

    Raises:
        AttentionUnavailableError: FlashInfer cannot serve the model on this machine.
    """

    def __init__(self, model: Model, limits: EngineConfig, policy: CascadePolicy | None):
        c = model.config
        windows = tuple(dict.fromkeys(c.windows)) or (0,)
        if attention_backend(model.device, model.dtype, c.head_dim, limits.page_size) != "flashinfer":
            raise AttentionUnavailableError(f"FlashInfer cannot serve {model.dtype} with head_dim={c.head_dim} on this machine")
        self.policy = policy
        self._shape = (
            pages_for(limits.max_model_len, limits.page_size), c.num_heads, c.num_kv_heads, c.head_dim, limits.page_size, model.dtype,
            model.device,
        )  # fmt: skip
        self._workspace = AttentionWorkspace(max(limits.max_num_seqs, EXTENSION), c.num_heads, c.num_kv_heads, c.head_dim, model.device)
        # A plan holds page tables, so the layers of each pool need their own.
        groups = [(0,), tuple(filter(None, windows))] if len(c.pool_sizes) == 2 else [windows]
        self._groups, self._softcap = groups, c.attention_softcap
        try:
            windows, self._windowed = groups[0], None
            self._prompt = self._prompt_plan(limits.max_num_seqs, windows)
            if len(groups) == 2:
                self._windowed = self._prompt_plan(limits.max_num_seqs, groups[1])
            own, windowed = (self._prompt_plan(limits.max_num_seqs), self._prompt) if any(windows) else (self._prompt, None)
            self._cascade = FlashInferCascade(own, self._prompt_plan(limits.max_num_seqs, causal=False), windowed)
        except (ImportError, OSError, RuntimeError) as error:  # kernels cannot be built or loaded, such as without a compiler
            raise AttentionUnavailableError(f"FlashInfer's kernels could not be built or loaded: {error}") from error

    def _prompt_plan(self, max_rows: int, windows: tuple[int, ...] = (0,), *, causal: bool = True) -> PrefillPlan:
        options: dict[str, Any] = {"causal": causal, "windows": windows, "softcap": self._softcap}
        try:
            return PrefillPlan(self._workspace, max_rows, *self._shape, **options)
        except (ImportError, OSError, RuntimeError):
            return PrefillPlan(self._workspace, max_rows, *self._shape, backend="fa2", **options)

    def decode_plans(self, size: int) -> DecodePlans:
        """Return new plans for decode batches of `size` rows."""
        plans = [DecodePlan(self._workspace, size, *self._shape, windows, self._softcap) for windows in self._groups]
        return DecodePlans(plans[0], plans[1] if len(plans) == 2 else None)

    def prompt_plans(self, host: HostBatch, *, together: bool) -> PromptPlans:
        """Return new plans for a batch of prompts, which stay valid. Arguments are as in `plan_prompt`."""
        assert host.cu_seqlens is not None
        plans = [self._prompt_plan(len(host.seq_lens), windows) for windows in self._groups]
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
        windowed = 0
        if self._windowed is not None:
            assert host.frame_tables is not None
            self._windowed.update(host.cu_seqlens, host.seq_lens, host.frame_tables, together=together)
            windowed = self._windowed.handle
        runs: list[Run] | None = None if self.policy is None else self.policy.prompts(host)
        if runs is not None:
            self._cascade.update(host.seq_lens, host.cu_seqlens, host.page_tables, runs)
            return self._cascade.handle, windowed
        self._prompt.update(host.cu_seqlens, host.seq_lens, host.page_tables, together=together)
        return self._prompt.handle, windowed
