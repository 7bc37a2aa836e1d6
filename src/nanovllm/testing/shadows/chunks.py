"""Chunks as plain tuples of cells: what every call of the chunk algebra ought to make, written out token by token."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

from nanovllm.state.kv_cache import KVState
from nanovllm.state.window_frames import Frames


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cell:
    """A token of a chunk: its position, and what its slot must hold, but for the rotation of its keys, which the position gives."""

    token: int
    position: int
    kv: Any


Cells: TypeAlias = tuple[Cell, ...]


@runtime_checkable
class Oracle(Protocol):
    """What a model makes of tokens whose KV came about in any way."""

    def kv_of(self, before: Cells, token: int, position: int) -> Any:
        """What a token's slot holds after it ran behind these."""
        ...

    def logits_after(self, cells: Cells) -> list[float]:
        """The logits of the next token; the last one attends to its slot as it is."""
        ...

    def require_cells(self, kv: KVState, pages: Seq[int], cells: Cells, frames: Frames | None = None, retired: int = 0) -> None:
        """Raise `ShadowMismatchError` unless the pages hold these cells, and so do their frames, which those from place `retired` on must
        have."""
        ...

    def require_logits(self, found: Seq[float], cells: Cells, *, exact: bool) -> None:
        """Raise `ShadowMismatchError` unless these are the logits after the cells; where they are `exact`, those of a full prefill too."""
        ...

    def likeliest(self, token: int, logits: Seq[float]) -> bool:
        """Whether greedy decoding may draw this token."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShadowChunk:
    """A chunk as its making says: cells, how many of the first are exact, and the operations that made the others approximate."""

    cells: Cells
    num_exact: int
    operations: tuple[str, ...] = ()

    @property
    def token_ids(self) -> list[int]:
        """The tokens in order."""
        return [cell.token for cell in self.cells]

    @property
    def gapped(self) -> bool:
        """Whether positions were left out."""
        return any(cell.position != at for at, cell in enumerate(self.cells))


@dataclass(slots=True)
class ChunkShadow:
    """The algebra. Every method returns what the call of that name ought to make."""

    oracle: Oracle
    known: dict[tuple[int, ...], Cell] = field(default_factory=dict)  # the last cell of exact runs

    def exact(self, tokens: Iterable[int]) -> ShadowChunk:
        """A full prefill."""
        cells: Cells = ()
        run: tuple[int, ...] = ()
        for at, token in enumerate(tokens):
            run = (*run, token)
            if run not in self.known:
                self.known[run] = Cell(token=token, position=at, kv=self.oracle.kv_of(cells, token, at))
            cells = (*cells, self.known[run])
        return ShadowChunk(cells=cells, num_exact=len(cells))

    def extended(self, base: ShadowChunk, tokens: Seq[int]) -> ShadowChunk:
        """Tokens run behind a chunk, at the positions that follow its last."""
        if not base.operations:
            return self.exact([*base.token_ids, *tokens])
        cells = base.cells
        for token in tokens:
            position = cells[-1].position + 1
            cells = (*cells, Cell(token=token, position=position, kv=self.oracle.kv_of(cells, token, position)))
        return _labelled(cells, base.num_exact, base.operations)

    def cut(self, base: ShadowChunk, length: int) -> ShadowChunk:
        """The first tokens of a chunk."""
        return _labelled(base.cells[:length], base.num_exact, base.operations)

    def composed(self, bases: Seq[ShadowChunk], recompute: int | float | str) -> ShadowChunk:
        """Chunks one after another. A fraction runs all of the later ones: the two layers that choose tokens are the whole model here."""
        if len(bases) == 1 and not bases[0].gapped:
            return bases[0]
        cells = tuple(cell for base in bases for cell in base.cells)
        if isinstance(recompute, str):
            return self.exact([cell.token for cell in cells])
        places, start = list[int](), len(bases[0].cells)
        for base in bases[1:]:
            count = len(base.cells) if isinstance(recompute, float) else min(recompute, len(base.cells))
            places.extend(range(start, start + count))
            start += len(base.cells)
        operations = _joined(bases, f"composed, recompute={recompute}")
        return _labelled(self._rerun(_placed(cells, 0), places), bases[0].num_exact, operations)

    def dropped(self, base: ShadowChunk, start: int, stop: int, mode: str) -> ShadowChunk:
        """A chunk without a span."""
        head, tail = self.cut(base, start), base.cells[stop:]
        if not tail:
            return head
        if mode == "recompute":
            return self.extended(head, [cell.token for cell in tail]) if start else self.exact([cell.token for cell in tail])
        moved = _placed(tail, head.cells[-1].position + 1 if start else 0) if mode == "shift" else tail
        return _labelled(head.cells + moved, min(base.num_exact, start), _joined([base], f"dropped by {mode}"))

    def _rerun(self, cells: Cells, places: Iterable[int]) -> Cells:
        """Tokens run again in place, in order."""
        made = list(cells)
        for at in places:
            token, position = made[at].token, made[at].position
            made[at] = Cell(token=token, position=position, kv=self.oracle.kv_of(tuple(made[:at]), token, position))
        return tuple(made)


def _labelled(cells: Cells, num_exact: int, operations: tuple[str, ...]) -> ShadowChunk:
    exact = min(num_exact, len(cells))
    return ShadowChunk(cells=cells, num_exact=exact, operations=() if exact == len(cells) else operations)


def _joined(bases: Seq[ShadowChunk], operation: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*(name for base in bases for name in base.operations), operation)))


def _placed(cells: Cells, start: int) -> Cells:
    """The same cells at positions `start ...`."""
    return tuple(Cell(token=cell.token, position=start + i, kv=cell.kv) for i, cell in enumerate(cells))
