"""`Chunk`: an immutable handle on the KV of a run of tokens."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from nanovllm.state.vector import IntVector

Gaps = tuple[tuple[int, int], ...]  # (index of a token, its position less its index), for the first token after each gap


def offset_after(gaps: Gaps) -> int:
    """The position less the index of all tokens behind the last gap."""
    return gaps[-1][1] if gaps else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """How the KV came about: exact (what a full prefill of the same tokens gives), or the operations that made it approximate."""

    operations: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """True when no operation changed what a full prefill would have given."""
        return not self.operations

    def __str__(self) -> str:
        return "exact" if self.exact else "approximate: " + ", ".join(self.operations)


EXACT = Provenance()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunk:
    """KV of `len(chunk)` tokens in `pages`, the last of which may be partly filled.

    The first `num_exact` tokens are exact whatever the provenance of the whole. `gaps` tell where drops by `gap` left positions out.
    `liveness` is unique in its engine and listed in `EngineState.chunks` until the chunk is released; `engine` names that engine.
    """

    tokens: IntVector
    pages: IntVector
    provenance: Provenance
    num_exact: int
    gaps: Gaps = ()
    fingerprint: str
    engine: str
    liveness: int

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"Chunk({len(self)} tokens, {len(self.pages)} pages, {self.provenance}, liveness={self.liveness})"

    @property
    def token_ids(self) -> np.ndarray:
        """The tokens, int32 `[len(chunk)]`, read-only."""
        return self.tokens.array()

    @property
    def positions(self) -> np.ndarray:
        """The position each key was rotated for, int32 `[len(chunk)]`."""
        positions = np.arange(len(self), dtype=np.int32)
        for (start, offset), (stop, _) in pairwise((*self.gaps, (len(self), 0))):
            positions[start:stop] += offset
        return positions
