"""What quantised weights cost: a model beside the same model with other weights, layer by layer and by its predictions over a text.

Both models compute in float64 with plain layers, so that the figures are those of the weights alone, and not of a kernel or a dtype.
"""

import math
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from nanovllm.errors import InvalidRequestError
from nanovllm.models.check.compare import text_batch, wide, wide_logits
from nanovllm.models.common import layers
from nanovllm.models.common.batch import Batch
from nanovllm.models.model import Model
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.state.kv_cache import pages_for
from nanovllm.types import Float, Tensor

PAGE = 16  # tokens per page of the KV of a layer
ROWS = 64  # tokens whose logits are computed at once: each takes 1.2 MB for a vocabulary of 150,000


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """A model's distance from a reference over a text.

    Attributes:
        model: The name of the model.
        quantization: How its weights are quantised, in words.
        reference: The name of the reference.
        vocab_size: Tokens of the vocabulary.
        num_tokens: Tokens of the text.
        bytes: Bytes of the model's weights.
        reference_bytes: Bytes of the reference's weights.
        layers: For each layer, given the reference's input: the distance of its output from the reference's, as a fraction of what the
            layer adds to its input. Both are root mean squares over the text.
        divergence: The mean Kullback-Leibler divergence of the next tokens' probabilities from the reference's, in nats per token.
        worst_divergence: The largest one of a token.
        agreement: At how many places both have the same most probable token.
        perplexity: Of the text, by the model.
        reference_perplexity: Of the text, by the reference.
    """

    model: str
    quantization: str
    reference: str
    vocab_size: int
    num_tokens: int
    bytes: int
    reference_bytes: int
    layers: tuple[float, ...]
    divergence: float
    worst_divergence: float
    agreement: int
    perplexity: float
    reference_perplexity: float

    @property
    def knows_text(self) -> bool:
        """Whether the reference predicts the text better than chance would. Otherwise the perplexities say nothing about the weights."""
        return self.reference_perplexity < self.vocab_size

    def as_json(self) -> dict[str, Any]:
        """The figures for JSON. None takes the place of a number that is not finite."""
        figures = {**asdict(self), "layers": [_finite(error) for error in self.layers]}
        return {name: _finite(value) if isinstance(value, float) else value for name, value in figures.items()}


@torch.no_grad()
def cost(model: Model, reference: Model, token_ids: Seq[int]) -> Cost:
    """Compare a model with a reference of the same shapes on a text.

    Memory: one layer of each in float64, and hidden states of the text.

    Args:
        model: The model, usually with quantised weights.
        reference: The model that it stands for, usually without.
        token_ids: The text, at least two tokens.

    Raises:
        InvalidRequestError: The models have other shapes or devices, or run through transformers, or the text is too short.
    """
    if model.foreign or reference.foreign or len(model.params.layers) != len(reference.params.layers):
        raise InvalidRequestError(f"{model.name} and {reference.name} cannot be compared: both must be of one built-in architecture")
    if model.device != reference.device or _shapes(model) != _shapes(reference):
        raise InvalidRequestError(f"{model.name} and {reference.name} cannot be compared: they have other shapes, or are on other devices")
    if len(token_ids) < 2:
        raise InvalidRequestError(f"a text of {len(token_ids)} tokens is too short to compare models on: give at least 2")
    ids = torch.tensor(token_ids, dtype=torch.int32, device=model.device)
    text = text_batch(ids, PAGE)
    right = layers.embed(reference.params, text, reference.config).double()
    own = layers.embed(model.params, text, model.config).double()
    errors: list[Tensor] = []
    angles = layers.given_each(reference.params, text, reference.config)
    for mine, theirs, (cos, sin, view) in zip(model.params.layers, reference.params.layers, angles, strict=True):
        both = [pytree.tree_map(wide, w, is_leaf=lambda leaf: isinstance(leaf, QuantisedMatrix)) for w in (mine, theirs)]
        want = _layer(reference, both[1], right, cos, sin, view)
        apart, added = (_layer(model, both[0], right, cos, sin, view) - want).norm(), (want - right).norm()
        errors.append(torch.where(apart == 0, 0.0, apart / added))
        own, right = _layer(model, both[0], own, cos, sin, view), want
    divergences, agreed, own_surprise, surprise = [], 0, 0.0, 0.0
    for first in range(0, len(ids), ROWS):
        at = slice(first, first + ROWS)
        mine, theirs = _logprobs(model, own[at]), _logprobs(reference, right[at])
        divergences += (theirs.exp() * (theirs - mine)).sum(-1).tolist()
        agreed += int((mine.argmax(-1) == theirs.argmax(-1)).sum())
        following = ids[first + 1 : first + 1 + ROWS].long()[:, None]
        own_surprise -= float(mine[: len(following)].gather(1, following).sum())
        surprise -= float(theirs[: len(following)].gather(1, following).sum())
    return Cost(
        model=model.name,
        quantization=model.quantization,
        reference=reference.name,
        vocab_size=reference.config.vocab_size,
        num_tokens=len(ids),
        bytes=_bytes(model),
        reference_bytes=_bytes(reference),
        layers=tuple(torch.stack(errors).tolist()),
        divergence=sum(divergences) / len(ids),
        worst_divergence=max(divergences),
        agreement=agreed,
        perplexity=_exp(own_surprise / (len(ids) - 1)),
        reference_perplexity=_exp(surprise / (len(ids) - 1)),
    )


def _exp(nats: float) -> float:
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _layer(model: Model, w: Any, x: Float[Tensor, "T M"], cos: Tensor, sin: Tensor, view: Batch) -> Float[Tensor, "T M"]:
    config = model.config
    shape = (1, pages_for(len(x), PAGE), 2, config.num_kv_heads, PAGE, config.head_dim)
    return model.spec.layer(w, x, torch.zeros(shape, dtype=x.dtype, device=x.device), 0, cos, sin, view, config)


def _logprobs(model: Model, x: Float[Tensor, "R M"]) -> Float[Tensor, "R V"]:
    return torch.cat([*wide_logits(model, x)], -1).log_softmax(-1)


def _leaves(model: Model) -> list[Tensor | QuantisedMatrix]:
    every = pytree.tree_leaves(model.params, is_leaf=lambda leaf: isinstance(leaf, QuantisedMatrix))
    return [leaf for leaf in every if isinstance(leaf, Tensor | QuantisedMatrix)]


def _shapes(model: Model) -> list[tuple[int, ...]]:
    every = [*_leaves(model)]
    head = model.params.embed if model.params.head is None else model.params.head
    return [tuple(leaf.shape) for leaf in every if leaf is not model.params.head] + [tuple(head.shape)]


def _bytes(model: Model) -> int:
    return sum(leaf.nbytes for leaf in _leaves(model))
