"""Adapters for other engines, so that the workloads can call their `generate`."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES
from nanovllm.errors import InvalidRequestError
from nanovllm.loading.hub import resolve_folder
from nanovllm.models.model import Model

Make = Callable[[Model, str], "Peer"]  # from our model and the value of `--model`


class Peer(Protocol):
    """An engine to compare with. It has the same weights as ours, or random weights of the same shapes."""

    name: str

    def generate(self, prompts: list[list[int]], max_tokens: list[int], temperature: float) -> list[list[int]]:
        """Generate exactly `max_tokens[i]` tokens after each prompt, ignoring the end-of-sequence token. Returns token ids in order."""
        ...


class Transformers:
    """transformers' own `generate`: one batch from start to end, prompts padded on the left, no KV kept between calls."""

    name = "transformers"

    def __init__(self, model: Model, source: str):
        """Load the checkpoint `source` a second time, or make other random weights if `source` is one of `SHAPES`.

        Raises `InvalidRequestError` if transformers is not installed.
        """
        self._device, self._model = model.device, in_transformers(model, source)
        self._model.generation_config.eos_token_id = None  # min_new_tokens would forbid the token instead of ignoring it

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], max_tokens: list[int], temperature: float) -> list[list[int]]:
        """Generate tokens in one batch. Every row runs as long as the longest, and shorter replies are truncated."""
        width, most = max(map(len, prompts)), max(max_tokens)
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=self._device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self._device)
        drawing = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        out = self._model.generate(ids, attention_mask=mask, max_new_tokens=most, pad_token_id=0, **drawing)
        return [row[:count] for row, count in zip(out[:, width:].tolist(), max_tokens, strict=True)]


PEERS: dict[str, Make] = {"transformers": Transformers}


def find_peers(names: list[str]) -> list[Make]:
    """The adapters of these names. Raises `InvalidRequestError` for an unknown name."""
    if unknown := [name for name in names if name not in PEERS]:
        raise InvalidRequestError(
            f"unknown peer {unknown[0]!r}; choose from {', '.join(PEERS)}: measure other engines with their own programs"
        )
    return [PEERS[name] for name in names]


def in_transformers(model: Model, source: str) -> Any:
    """The transformers model on the same device: the checkpoint `source`, or random weights if `source` is one of `SHAPES`.

    Raises `InvalidRequestError` if transformers is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise InvalidRequestError(f"the peer 'transformers' is not installed ({error}): pip install transformers") from None
    if source not in SHAPES:
        folder, _ = resolve_folder(source)
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype)
        return loaded.to(model.device).eval()
    c = model.config
    config = transformers.AutoConfig.for_model(
        "qwen3" if c.architecture.startswith("Qwen3") else "llama",
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads, head_dim=c.head_dim, rms_norm_eps=c.rms_norm_eps,
        tie_word_embeddings=c.tie_word_embeddings, max_position_embeddings=c.max_position_embeddings,
    )  # fmt: skip
    with model.device:  # initialised on the device: on a CPU, billions of weights take minutes
        return transformers.AutoModelForCausalLM.from_config(config, dtype=model.dtype).eval()
