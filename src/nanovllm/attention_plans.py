"""The attention plans of one engine: which kernels serve its model, and the workspace that all its plans share."""

from .batch import HostBatch
from .config import EngineConfig
from .errors import NanoVLLMError
from .model import Model
from .ops.flashinfer import AttentionWorkspace, DecodePlan, PrefillPlan, attention_backend
from .state.kv import pages_for


class AttentionUnavailableError(NanoVLLMError):
    """FlashInfer cannot serve a model on this machine; plain torch attention can, slowly."""


class Attention:
    """The FlashInfer plans of one engine. Raises `AttentionUnavailableError` where FlashInfer cannot serve the model on this machine."""

    def __init__(self, model: Model, limits: EngineConfig):
        c = model.config
        if attention_backend(model.device, model.dtype, c.head_dim, limits.page_size) != "flashinfer":
            raise AttentionUnavailableError(f"FlashInfer cannot serve {model.dtype} with head_dim={c.head_dim} here")
        self._shape = (
            pages_for(limits.max_model_len, limits.page_size), c.num_heads, c.num_kv_heads, c.head_dim, limits.page_size, model.dtype,
            model.device,
        )  # fmt: skip
        self._workspace = AttentionWorkspace(limits.max_num_seqs, c.num_heads, c.num_kv_heads, c.head_dim, model.device)
        try:
            self._prompt = self._prompt_plan(limits.max_num_seqs)
        except (ImportError, OSError, RuntimeError) as error:  # what building or loading kernels ends in without a compiler
            raise AttentionUnavailableError(f"FlashInfer's kernels could not be built or loaded: {error}") from error

    def _prompt_plan(self, max_rows: int) -> PrefillPlan:
        try:
            return PrefillPlan(self._workspace, max_rows, *self._shape)
        except (ImportError, OSError, RuntimeError):
            return PrefillPlan(self._workspace, max_rows, *self._shape, backend="fa2")

    def decode_plan(self, size: int) -> DecodePlan:
        """A plan of its own for decode batches of `size` rows."""
        return DecodePlan(self._workspace, size, *self._shape)

    def plan_prompt(self, host: HostBatch) -> int:
        """The handle for a batch of prompts."""
        assert host.cu_seqlens is not None
        self._prompt.update(host.cu_seqlens, host.seq_lens, host.page_tables)
        return self._prompt.handle
