"""The attention plans of one engine: which kernels serve its model, which batches share pages, and the memory that all its plans share."""

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
    """FlashInfer cannot serve a model on this machine; plain torch attention can, slowly."""


@dataclass(frozen=True, slots=True)
class DecodePlans:
    """What a decode batch follows in layers of the first KV pool, and in those of the second, where there is one."""

    first: DecodePlan
    windowed: DecodePlan | None

    @property
    def batch_size(self) -> int:
        """Rows."""
        return self.first.batch_size

    @property
    def handles(self) -> tuple[int, int]:
        """What goes into `Batch.plan` and `Windowed.plan`."""
        return self.first.handle, 0 if self.windowed is None else self.windowed.handle

    def update(self, host: HostBatch) -> None:
        """Plan for the pages, and their frames, that the rows of a batch hold, until the next update."""
        self.first.update(host.page_counts, host.page_tables)
        if self.windowed is not None:
            assert host.frame_tables is not None
            self.windowed.update(host.page_counts, host.frame_tables)


class Attention:
    """The FlashInfer plans of one engine. Raises `AttentionUnavailableError` where FlashInfer cannot serve the model on this machine."""

    def __init__(self, model: Model, limits: EngineConfig, policy: CascadePolicy | None):
        c = model.config
        windows = tuple(dict.fromkeys(c.windows)) or (0,)
        if attention_backend(model.device, model.dtype, c.head_dim, limits.page_size) != "flashinfer":
            raise AttentionUnavailableError(f"FlashInfer cannot serve {model.dtype} with head_dim={c.head_dim} here")
        self.policy = policy
        self._shape = (
            pages_for(limits.max_model_len, limits.page_size), c.num_heads, c.num_kv_heads, c.head_dim, limits.page_size, model.dtype,
            model.device,
        )  # fmt: skip
        self._workspace = AttentionWorkspace(max(limits.max_num_seqs, EXTENSION), c.num_heads, c.num_kv_heads, c.head_dim, model.device)
        # Plans hold page tables: layers with another pool follow others.
        groups = [(0,), tuple(filter(None, windows))] if len(c.pool_sizes) == 2 else [windows]
        self._groups, self._softcap = groups, c.attention_softcap
        try:
            windows, self._windowed = groups[0], None
            self._prompt = self._prompt_plan(limits.max_num_seqs, windows)
            if len(groups) == 2:
                self._windowed = self._prompt_plan(limits.max_num_seqs, groups[1])
            own, windowed = (self._prompt_plan(limits.max_num_seqs), self._prompt) if any(windows) else (self._prompt, None)
            self._cascade = FlashInferCascade(own, self._prompt_plan(limits.max_num_seqs, causal=False), windowed)
        except (ImportError, OSError, RuntimeError) as error:  # what building or loading kernels ends in without a compiler
            raise AttentionUnavailableError(f"FlashInfer's kernels could not be built or loaded: {error}") from error

    def _prompt_plan(self, max_rows: int, windows: tuple[int, ...] = (0,), *, causal: bool = True) -> PrefillPlan:
        options: dict[str, Any] = {"causal": causal, "windows": windows, "softcap": self._softcap}
        try:
            return PrefillPlan(self._workspace, max_rows, *self._shape, **options)
        except (ImportError, OSError, RuntimeError):
            return PrefillPlan(self._workspace, max_rows, *self._shape, backend="fa2", **options)

    def decode_plans(self, size: int) -> DecodePlans:
        """Plans of their own for decode batches of `size` rows."""
        plans = [DecodePlan(self._workspace, size, *self._shape, windows, self._softcap) for windows in self._groups]
        return DecodePlans(plans[0], plans[1] if len(plans) == 2 else None)

    def plan_prompt(self, host: HostBatch, *, together: bool) -> tuple[int, int]:
        """The handles for a batch of prompts, of layers of the first KV pool and of the second. `together`: `paged_prefill` is given the
        new tokens' keys and values, too."""
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
