"""`Chunk`: an immutable handle on the KV of a row of tokens."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from nanovllm.state.html import card
from nanovllm.state.vector import IntVector

Gaps = tuple[tuple[int, int], ...]  # (index of a token, its position less its index), for the first token after each gap


def offset_after(gaps: Gaps) -> int:
    """Return position minus index for all tokens after the last gap."""
    return gaps[-1][1] if gaps else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """How KV came about: exact, or the operations that made it approximate.

    KV is exact if a full prefill of the same tokens gives the same.
    """

    operations: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether a full prefill of the same tokens gives the same KV."""
        return not self.operations

    def __str__(self) -> str:
        return "exact" if self.exact else "approximate: " + ", ".join(self.operations)


EXACT = Provenance()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunk:
    """An immutable handle on the KV of `len(chunk)` tokens.

    The pages live until `release`. Several chunks may share pages. `str(chunk.provenance)` says whether the KV is exact or approximate.

    Attributes:
        tokens: The token ids; `token_ids` has them as an array.
        pages: The pages that hold the KV, in order; the last one may be partly filled. After `offload` a chunk has other pages:
            `EngineState.chunks` has it with those that it has now.
        provenance: How the KV came about: exact, or the operations that made it approximate.
        num_exact: The number of leading tokens whose KV is exact, whatever the provenance of the whole.
        gaps: Where `drop(mode="gap")` left positions out: for the first token after each gap, its index, and its position minus its index.
        fingerprint: The fingerprint of the model that made the KV.
        engine: The id of the engine that holds the pages.
        liveness: The number of this handle, unique in its engine. `EngineState.chunks` lists it until the chunk is released.

    Examples:
        >>> state, chunk = nv.prefill(model, state, "Once upon a time")
        >>> chunk
        Chunk(4 tokens, 1 page, exact, liveness=0)
        >>> len(chunk), chunk.num_exact, str(chunk.provenance)
        (4, 4, 'exact')
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
        tokens, pages = (f"{n} {unit}{'s' * (n != 1)}" for n, unit in ((len(self), "token"), (len(self.pages), "page")))
        return f"Chunk({tokens}, {pages}, {self.provenance}, liveness={self.liveness})"

    def _repr_html_(self) -> str:
        exact = f"{self.num_exact:,} of {len(self):,} tokens"
        figures = [("tokens", f"{len(self):,}"), ("pages", f"{len(self.pages):,}"), ("KV", self.provenance), ("exact", exact)]
        return card(f"Chunk {self.liveness}", figures)

    @property
    def token_ids(self) -> np.ndarray:
        """The token ids, int32 `[len(chunk)]`, read-only.

        Examples:
            >>> state, chunk = nv.prefill(model, state, "Once upon a time")
            >>> chunk.token_ids.tolist()
            [858, 974, 258, 632]
        """
        return self.tokens.array()

    @property
    def positions(self) -> np.ndarray:
        """The position for which each key was rotated, int32 `[len(chunk)]`.

        Examples:
            >>> state, chunk = nv.prefill(model, state, "Once upon a time")
            >>> state, chunk = nv.drop(model, state, chunk, 1, 2, mode="gap")
            >>> chunk.positions.tolist()
            [0, 2, 3]
        """
        positions = np.arange(len(self), dtype=np.int32)
        for (start, offset), (stop, _) in pairwise((*self.gaps, (len(self), 0))):
            positions[start:stop] += offset
        return positions
