"""Ranks that share a model compared with one process that has all of it: in float64 both must compute the same.

The layers of each rank in the model's dtype are compared with the layers of its part in float64 (`compare`). That does not tell whether the
parts are those of the model; that in float64 they compute what the whole model does tells it.
"""

from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from typing import Any

import torch

from nanovllm.models.check.agree import two_likeliest
from nanovllm.models.check.compare import compare, relative_error
from nanovllm.models.check.report import device_name
from nanovllm.models.model import Model
from nanovllm.types import Float, Int64, Tensor

BOUND = 1e-4  # of relative errors in float64; rotary angles are in float32, whose last bits differ between devices


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exact:
    """The results of a model for a text in float64, on the CPU.

    Attributes:
        device: The name of the device that computed them.
        final: The hidden states after the last layer, before the final norm.
        logits: The two largest logits after each token.
        tokens: Their tokens.
        routed: Whether the model has experts.
    """

    device: str
    final: Float[Tensor, "T M"]
    logits: Float[Tensor, "T 2"]
    tokens: Int64[Tensor, "T 2"]
    routed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsReport:
    """The distance between the results of the ranks and those of the whole model, both in float64.

    Attributes:
        device: The name of the device that ran the whole model.
        num_tokens: Tokens of the text.
        hidden: The largest relative error of the hidden states after the last layer; with experts, the median over tokens.
        logits: The same of the two largest logits after each token.
        same: For how many tokens the most probable next token is the same.
        bound: The largest allowed relative error.
    """

    device: str
    num_tokens: int
    hidden: float
    logits: float
    same: int
    bound: float = BOUND

    @property
    def holds(self) -> bool:
        """Whether the errors are within the bound. NaN is not."""
        return self.hidden <= self.bound and self.logits <= self.bound

    def as_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {**asdict(self), "holds": self.holds}


@torch.no_grad()
def exact_of(model: Model, final: Float[Tensor, "T M"]) -> Exact:
    """The results that belong to the hidden states `Compared.final`. Ranks that share the model call this at the same time."""
    logits, tokens = two_likeliest(model, final)
    return Exact(
        device=device_name(model.device), final=final.cpu(), logits=logits.cpu(), tokens=tokens.cpu(), routed=model.config.moe is not None
    )


def exact(model: Model, token_ids: Seq[int]) -> Exact:
    """The results of a whole model for a text. Beside its weights it needs the memory of one layer in float64."""
    return exact_of(model, compare(model, None, token_ids, (1,)).final)


def compare_parts(parts: Exact, whole: Exact) -> PartsReport:
    """Compare the results of the ranks with those of the whole model for the same text."""
    hidden, logits = ((getattr(parts, name), getattr(whole, name)) for name in ("final", "logits"))
    return PartsReport(
        device=whole.device,
        num_tokens=len(whole.final),
        hidden=float(relative_error(*hidden, hidden[1], routed=whole.routed)),
        logits=float(relative_error(*logits, logits[1], routed=whole.routed)),
        same=int((parts.tokens[:, 0] == whole.tokens[:, 0]).sum()),
    )
