"""Other engines in the same run: an adapter gives each the `generate` that the workloads call."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES
from nanovllm.errors import InvalidRequestError
from nanovllm.loading.hub import resolve_folder
from nanovllm.models.model import Model

Make = Callable[[Model, str], "Peer"]  # from our model, and what `--model` named


class Peer(Protocol):
    """An engine to compare with, over the same weights as ours, or ones of the same sizes."""

    name: str

    def generate(self, prompts: list[list[int]], max_tokens: list[int], temperature: float) -> list[list[int]]:
        """Token ids in and out, in order; as many for each prompt as it asks for, the end-of-sequence token ignored."""
        ...


class Transformers:
    """transformers' own `generate`: one batch from start to end, prompts padded on the left, no KV kept from call to call."""

    name = "transformers"

    def __init__(self, model: Model, source: str):
        """`source` is a checkpoint, whose weights are loaded again, or one of `SHAPES`, which gets other random ones.

        Raises `InvalidRequestError` where transformers is not installed.
        """
        self._device, self._model = model.device, in_transformers(model, source)
        self._model.generation_config.eos_token_id = None  # min_new_tokens would forbid the token instead of ignoring it

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], max_tokens: list[int], temperature: float) -> list[list[int]]:
        """See `Peer`. Every row runs as long as the longest; what a shorter one asked for is cut out."""
        width, most = max(map(len, prompts)), max(max_tokens)
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=self._device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self._device)
        drawing = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        out = self._model.generate(ids, attention_mask=mask, max_new_tokens=most, pad_token_id=0, **drawing)
        return [row[:count] for row, count in zip(out[:, width:].tolist(), max_tokens, strict=True)]


PEERS: dict[str, Make] = {"transformers": Transformers}


def find_peers(names: list[str]) -> list[Make]:
    """The adapters of these names. Raises `InvalidRequestError` for a name that there is none of."""
    if unknown := [name for name in names if name not in PEERS]:
        raise InvalidRequestError(f"unknown peer {unknown[0]!r}; there are {', '.join(PEERS)}")
    return [PEERS[name] for name in names]


def in_transformers(model: Model, source: str) -> Any:
    """The model as transformers has it, on the model's device: the checkpoint that `source` names, or random weights of the same sizes.

    Raises `InvalidRequestError` where transformers is not installed.
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
    with model.device:  # drawn where they are needed: on a CPU, billions of them take minutes
        return transformers.AutoModelForCausalLM.from_config(config, dtype=model.dtype).eval()
