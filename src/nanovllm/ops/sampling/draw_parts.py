"""`draw_parts`: `highest` and `draw` over logits of which each rank has those of its own tokens. The ranks exchange only their best tokens.

That is 8 or 16 bytes for each row and rank, while the logits of all tokens are hundreds of kilobytes.
"""

from dataclasses import dataclass

import torch

from nanovllm.config import Mesh, ModelConfig
from nanovllm.ops.attention.plan_table import lookup
from nanovllm.ops.backends import installed
from nanovllm.ops.distributed.collectives import all_gather_columns
from nanovllm.ops.distributed.group import Group
from nanovllm.ops.sampling.draw import gumbel, highest
from nanovllm.ops.sampling.uniforms import uniforms
from nanovllm.types import Float, Float32, Int32, Int64, Tensor

_LIBRARY = torch.library.Library("nanovllm", "FRAGMENT")
_LIBRARY.define(
    "draw_parts(Tensor logits, Tensor? temperature, Tensor? keys, SymInt group, SymInt vocab_size) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """How logits are divided: each rank has as many columns, in the order of the ranks, and columns beyond the vocabulary mean nothing.

    Attributes:
        mesh: The ranks.
        vocab_size: The number of token ids.
    """

    mesh: Mesh
    vocab_size: int

    def whole(self, logits: Float[Tensor, "B N"]) -> Float[Tensor, "B V"]:
        """The logits of all tokens, on every rank."""
        return all_gather_columns(logits, self.mesh, self.vocab_size)


def parts_of(config: ModelConfig) -> Parts | None:
    """How a model's function with this config divides its logits. None: it returns those of all tokens."""
    mesh = config.mesh
    return None if mesh is None or mesh.gathers else Parts(mesh=mesh, vocab_size=config.vocab_size)


def draw_parts(
    logits: Float[Tensor, "B N"], temperature: Float32[Tensor, "B"] | None, keys: Int64[Tensor, "B 2"] | None, parts: Parts
) -> Int32[Tensor, "B"]:
    """Sample one token per row, the same one on all ranks: the token that `draw` samples from the logits of all tokens.

    The noise is a function of the key and the token id, so each rank finds the best of its own tokens. Of these the largest sum wins, and
    the lowest id of a tie.

    Args:
        logits: This rank's logits, `[B, N]`.
        temperature: Temperature of each row, float32 `[B]`. None: the token of the largest logit, as `highest` gives it.
        keys: Seed and position of each row, int64 `[B, 2]`; None without temperatures.
        parts: How the logits are divided.

    Returns:
        Token ids, int32 `[B]`. What `draw` says of rows with NaN, and of rows in which all logits are -inf, holds.

    Raises:
        EngineDeadError: A rank has gone.
    """
    return torch.ops.nanovllm.draw_parts.default(logits, temperature, keys, parts.mesh.group, parts.vocab_size)


@torch.library.register_fake("nanovllm::draw_parts", lib=_LIBRARY)
def _fake(logits: Tensor, temperature: Tensor | None, keys: Tensor | None, group: int, vocab_size: int) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int32)


def candidates(
    logits: Float[Tensor, "B N"], temperature: Float32[Tensor, "B"] | None, keys: Int64[Tensor, "B 2"] | None, first: int, num: int
) -> tuple[Float[Tensor, "B 1"], Int32[Tensor, "B 1"]]:
    """The best of a rank's tokens in plain torch: its logit or its sum of logit and noise, float64 `[B, 1]`, and its id, int32 `[B, 1]`.

    Args:
        logits: The rank's logits, `[B, N]`.
        temperature: As in `draw_parts`.
        keys: As in `draw_parts`.
        first: The token of the first column.
        num: How many columns are tokens. If there is none, every row has -inf.
    """
    if not num:
        rows = len(logits)
        return logits.new_full((rows, 1), -torch.inf, dtype=torch.float64), logits.new_full((rows, 1), first - 1, dtype=torch.int32)
    own = logits[:, :num]
    at = highest(own).long()
    values = own.gather(1, at.unsqueeze(1)).double()
    if temperature is not None and keys is not None and (random := temperature > 0).any():
        noise = gumbel(uniforms(keys[random], first + num)[:, first:])
        sums = own[random].float() + temperature[random].unsqueeze(1) * noise  # as `draw` computes them
        best = sums.argmax(1)
        at[random], values[random] = best, sums.gather(1, best.unsqueeze(1)).double()
    return values, (first + at.unsqueeze(1)).int()


def _run(logits: Tensor, temperature: Tensor | None, keys: Tensor | None, group: int, vocab_size: int) -> Tensor:
    ranks, width = lookup(group, Group), logits.shape[1]
    first = min(ranks.rank * width, vocab_size)
    num = min(width, vocab_size - first)
    if not logits.is_cuda or not installed("triton") or (temperature is None and logits.dtype == torch.float64):
        return ranks.winners(*candidates(logits, temperature, keys, first, num))
    from nanovllm.ops.sampling.triton_sampling import drawn_of_blocks, highest_of_blocks

    if temperature is None or keys is None:
        return ranks.winners(*highest_of_blocks(logits, first, num))
    return ranks.winners(*drawn_of_blocks(logits, temperature, None, keys, first, num))


_LIBRARY.impl("draw_parts", _run, "CompositeExplicitAutograd")
