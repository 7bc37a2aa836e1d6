"""Observes how a model of transformers attends, before its weights are read: it runs once on the meta device, recording every call."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from nanovllm.config import ModelConfig, RopeConfig
from nanovllm.errors import CheckpointError
from nanovllm.loading.transformers.found import Found, quiet, refuse
from nanovllm.models.common.hf_config import read_dtype, read_ids, stretched
from nanovllm.models.transformers import ATTENTION, attach, attention
from nanovllm.types import Bool, Tensor

TRACED = "nanovllm_traced"  # the name of the recording attention
LEAST, MOST = 24, 8200  # the fewest and the most tokens of the run
HARMLESS = {"position_ids", "attention_mask"}  # tensors passed to attention that it does not need


def _whole_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """The complete mask that a model asks for, on the host: True if a query sees a key."""
    return sdpa_mask(*args, **{**kwargs, "device": "cpu", "attention_mask": None, "allow_is_causal_skip": False})


# These registrations hold for the whole process, because modules find their attention by name only. `ATTENTION` has no mask function, so no
# mask is made in a step: pages and lengths define which keys a query sees.
AttentionInterface.register(ATTENTION, attention)
AttentionInterface.register(TRACED, attention)
AttentionMaskInterface.register(TRACED, _whole_mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One layer's attention: the numbers of heads, and their sizes."""

    layer: int
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int


class Recorder(nn.Module):
    """Takes the place of a `PagedStep`: records the attention calls, and refuses calls that a `PagedStep` could not compute."""

    def __init__(self, found: Found, num_tokens: int) -> None:
        super().__init__()
        self.found, self.num_tokens = found, num_tokens
        self.calls: list[Call] = []
        self.masks: dict[tuple[int, int], Tensor] = {}  # compared masks, by id and window; kept alive so that no other mask gets their id

    def forward(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, *, attention_mask: Tensor | None = None,
        sliding_window: int | None = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Record a call, and return an empty tensor of the output's shape."""
        layer, window = module.layer_idx, sliding_window or 0
        if unknown := sorted(name for name, each in kwargs.items() if isinstance(each, Tensor) and name not in HARMLESS):
            sinks = " (attention sinks)" if "s_aux" in unknown else ""
            refuse(self.found, f"attention in layer {layer} takes {', '.join(unknown)}{sinks}, which paged attention does not support")
        causal = kwargs.get("is_causal")
        if (getattr(module, "is_causal", True) if causal is None else causal) is False and attention_mask is None:
            refuse(self.found, f"attention in layer {layer} is not causal")
        if query.shape[2] != self.num_tokens or key.shape[2] != self.num_tokens or len(query) != 1:
            refuse(self.found, f"attention in layer {layer} is over {tuple(key.shape)}, not over the step's {self.num_tokens} tokens")
        self._require_known(layer, window, attention_mask)
        heads = {"num_heads": query.shape[1], "num_kv_heads": key.shape[1], "key_dim": key.shape[-1], "value_dim": value.shape[-1]}
        self.calls.append(Call(layer=layer, **heads))
        return query.new_empty(1, self.num_tokens, query.shape[1], value.shape[-1])

    def _require_known(self, layer: int, window: int, mask: Tensor | None) -> None:
        if mask is None or (id(mask), window) in self.masks:
            return
        same = mask.device.type == "cpu" and mask.dtype == torch.bool and mask.shape[1:] == (1, self.num_tokens, self.num_tokens)
        if not same or not torch.equal(mask[0, 0], causal_mask(self.num_tokens, window)):
            known = f"the last {window} tokens" if window else "all tokens up to each"
            refuse(self.found, f"attention in layer {layer} has a mask of its own, which differs from the mask for {known}")
        self.masks[id(mask), window] = mask


def causal_mask(num_tokens: int, window: int) -> Bool[Tensor, "T T"]:
    """The mask that pages and a window make: a query sees itself and the tokens before it, `window` tokens in total; 0: all of them."""
    at = torch.arange(num_tokens)
    seen = at <= at[:, None]
    return seen & (at > at[:, None] - window) if window else seen


def trace(found: Found) -> ModelConfig:
    """Run the model on the meta device, without weights, and read its sizes off the run.

    Raises:
        CheckpointError: Paged attention cannot serve the model's attention.
    """
    num_tokens = _num_tokens(found.decoder)
    recorder = Recorder(found, num_tokens)
    try:
        with quiet(), torch.no_grad():
            module = skeleton(found, TRACED)
            attach(module, recorder)
            ids = torch.zeros(1, num_tokens, dtype=torch.int64, device="meta")
            # A mask of ones: without a mask the values of position_ids are read, and meta tensors have none.
            out = module(input_ids=ids, position_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
            hidden_size, logits = embedding(module).shape[1], out.logits
    except CheckpointError:
        raise
    except Exception as error:
        refuse(found, f"it does not run without weights: {type(error).__name__}: {' '.join(str(error).split())[:200]}", error)
    _require_layers(found, recorder.calls)
    return _config(found, recorder.calls, hidden_size, logits.shape[-1])


def skeleton(found: Found, attention: str) -> PreTrainedModel:
    """The model's module on the meta device, with the attention registered under this name."""
    with torch.device("meta"):
        module = found.model._from_config(copy.deepcopy(found.config), attn_implementation=attention)
    if module._can_set_experts_implementation():
        module.set_experts_implementation("batched_mm")  # other implementations read the chosen experts, which have no values here
    return module.eval()


def embedding(module: PreTrainedModel) -> Tensor:
    """The token embedding table, `[V, M]`."""
    table = module.get_input_embeddings().weight
    assert isinstance(table, Tensor)
    return table


def _num_tokens(config: PreTrainedConfig) -> int:
    """The number of tokens for the run: enough that windows and chunks of attention show."""
    sizes = [value for name, value in config.to_dict().items() if ("window" in name or "chunk" in name) and isinstance(value, int)]
    return min(MOST, max([LEAST, *(size + 8 for size in sizes)]))


def _require_layers(found: Found, calls: list[Call]) -> None:
    layers, count = [call.layer for call in calls], _size(found.decoder, "num_hidden_layers")
    if not calls:
        refuse(found, "its attention does not go through transformers' attention interface")
    if twice := sorted({layer for layer in layers if layers.count(layer) > 1}):
        refuse(found, f"attention in layer {twice[0]} runs {layers.count(twice[0])} times per step, each time over other keys")
    if without := sorted(set(range(count or 0)) - set(layers)):
        refuse(found, f"no attention runs in layer {', '.join(map(str, without[:8]))}, which may keep a state other than keys and values")
    if set(layers) != set(range(count or 0)):
        refuse(found, f"attention runs in layers {sorted(layers)}, the config says num_hidden_layers={count}")
    for part in ("num_heads", "num_kv_heads", "key_dim", "value_dim"):
        if len(sizes := {getattr(call, part) for call in calls}) > 1:
            refuse(found, f"{part} differs between layers: {', '.join(map(str, sorted(sizes)))}")


def _config(found: Found, calls: list[Call], hidden_size: int, vocab_size: int) -> ModelConfig:
    config, call = found.decoder, calls[0]
    ids = {name: getattr(config, name, None) for name in ("bos_token_id", "eos_token_id")}
    return ModelConfig(
        architecture=found.model.__name__,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_size(config, "intermediate_size") or 4 * hidden_size,
        num_layers=len(calls),
        num_heads=call.num_heads,
        num_kv_heads=call.num_kv_heads,
        head_dim=max(call.key_dim, call.value_dim),
        rms_norm_eps=1e-6,
        rope=RopeConfig(kind="unknown"),
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        max_position_embeddings=_positions(config),
        dtype=read_dtype({"dtype": str(found.config.dtype or config.dtype or "float32")}),
        bos_token_id=next(iter(read_ids(ids, "bos_token_id")), None),
        eos_token_ids=read_ids(ids, "eos_token_id"),
    )


def _positions(config: PreTrainedConfig) -> int:
    """The number of positions of the model, stretched by YaRN if its parameters say how far."""
    stated, rope = _size(config, "max_position_embeddings") or 2048, getattr(config, "rope_parameters", None)
    if not isinstance(rope, Mapping) or rope.get("rope_type") != "yarn":
        return stated
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    if not isinstance(factor, int | float) or not isinstance(original, int):
        return stated
    return stretched(stated, RopeConfig(kind="yarn", factor=float(factor), original_max_position_embeddings=original))


def _size(config: PreTrainedConfig, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
