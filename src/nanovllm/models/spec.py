"""`ModelSpec`: the functions of one architecture."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from nanovllm.config import ModelConfig
from nanovllm.models import transformers as fallback
from nanovllm.models.common import decoder, layers
from nanovllm.models.common.batch import Batch
from nanovllm.models.common.decoder import KV
from nanovllm.models.common.hf_config import HF, config_to_hf
from nanovllm.models.common.params import ParamInfo, Params
from nanovllm.types import Float, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The functions of one architecture. `nanovllm.models.REGISTRY` holds one for each name.

    Attributes:
        config_from_hf: Reads the content of a `config.json`. Raises `CheckpointError` for a setting that is not implemented.
        param_table: Describes every parameter of a model with this config, and the checkpoint tensors that it is made of.
        layer: One decoder layer in plain PyTorch. It is a function of its own so that it can be compiled once for all layers. If its pages
            are None (`forward` with `kv=None`), it uses functions that `torch.func` can transform, as `layers.layer` does.
        head: The final norm and the logits in plain PyTorch. Its keyword `functions` is that of `layers.head`.
        checkpoint_name: Maps the name of a checkpoint tensor to the name in the table; None if the tensor is not used.
        config_to_hf: The inverse of `config_from_hf`.
        known: Well-known models of this architecture, as `nanovllm models` prints them.

    Examples:
        >>> from nanovllm.models import REGISTRY
        >>> REGISTRY["Qwen3ForCausalLM"].known
        'Qwen3 from 0.6B to 32B'
    """

    config_from_hf: Callable[[HF], ModelConfig]
    param_table: Callable[[ModelConfig], Params[ParamInfo]]
    layer: Callable[..., Tensor] = layers.layer
    head: Callable[..., Tensor] = layers.head
    checkpoint_name: Callable[[str], str | None] = str
    config_to_hf: Callable[[ModelConfig], HF] = config_to_hf
    known: str = ""

    @overload
    def forward(
        self,
        params: Params[Tensor],
        kv: KV,
        batch: Batch,
        config: ModelConfig,
        *,
        layer: Callable[..., Tensor] | None = None,
        inputs_embeds: Float[Tensor, "..."] | None = None,
        add_hidden: Mapping[int, Float[Tensor, "..."]] | None = None,
        capture_hidden: None = None,
    ) -> tuple[Float[Tensor, "R V"], KV]: ...

    @overload
    def forward(
        self,
        params: Params[Tensor],
        kv: KV,
        batch: Batch,
        config: ModelConfig,
        *,
        layer: Callable[..., Tensor] | None = None,
        inputs_embeds: Float[Tensor, "..."] | None = None,
        add_hidden: Mapping[int, Float[Tensor, "..."]] | None = None,
        capture_hidden: Sequence[int],
    ) -> tuple[Float[Tensor, "R V"], KV, tuple[Float[Tensor, "_T M"], ...]]: ...

    def forward(
        self,
        params: Params[Tensor],
        kv: KV,
        batch: Batch,
        config: ModelConfig,
        *,
        layer: Callable[..., Tensor] | None = None,
        inputs_embeds: Float[Tensor, "..."] | None = None,
        add_hidden: Mapping[int, Float[Tensor, "..."]] | None = None,
        capture_hidden: Sequence[int] | None = None,
    ) -> tuple[Float[Tensor, "R V"], KV] | tuple[Float[Tensor, "R V"], KV, tuple[Float[Tensor, "_T M"], ...]]:
        """Donates `kv`. Run one step's tokens through the plain layers, never through the C kernels or the Triton kernels.

        Args:
            params: The weights.
            kv: The KV memory, or None, as in `nanovllm.forward`.
            batch: The tokens of the step.
            config: The model's config.
            layer: A layer function to use in place of `self.layer`, for example a compiled form of it.
            inputs_embeds: As in `nanovllm.forward`.
            add_hidden: As in `nanovllm.forward`.
            capture_hidden: As in `nanovllm.forward`.

        Returns:
            What `nanovllm.forward` returns.

        Raises:
            InvalidRequestError: As in `nanovllm.forward`.

        Examples:
            >>> def ints(*values):
            ...     return torch.tensor(values, dtype=torch.int32)
            >>> batch = nv.Batch(
            ...     input_ids=ints(5, 6), positions=ints(0, 1), slots=ints(0, 1), page_tables=ints([0]), seq_lens=ints(2),
            ...     cu_seqlens=ints(0, 2),
            ... )
            >>> logits, kv = model.spec.forward(model.params, state.kv, batch, model.config)
            >>> tuple(logits.shape)
            (2, 4096)
        """
        hidden: dict[str, Any] = {"inputs_embeds": inputs_embeds, "add_hidden": add_hidden, "capture_hidden": capture_hidden}
        if isinstance(params, fallback.ForeignParams):
            return fallback.forward(params, fallback.require_supported(kv, **hidden), batch, config)[0], kv
        return decoder.forward(params, kv, batch, config, layer=self.layer if layer is None else layer, head=self.head, **hidden)
