"""The shadow of chunks: plain tuples of cells, one per token, that say what each function on chunks must make."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

from nanovllm.state.kv_cache import KVState
from nanovllm.state.window_frames import Frames


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cell:
    """One token of a chunk: its position, and the KV that its slot must contain. Keys in `kv` are not rotated yet."""

    token: int
    position: int
    kv: Any


Cells: TypeAlias = tuple[Cell, ...]


@runtime_checkable
class Oracle(Protocol):
    """Computes KV and logits of tokens whose earlier tokens have any KV, exact or approximate."""

    def kv_of(self, before: Cells, token: int, position: int) -> Any:
        """Return the KV of a token that runs after the cells `before`."""
        ...

    def logits_after(self, cells: Cells) -> list[float]:
        """Return the logits of the next token; the last token attends to its own cell as it is."""
        ...

    def require_cells(self, kv: KVState, pages: Seq[int], cells: Cells, frames: Frames | None = None, retired: int = 0) -> None:
        """Raise `ShadowMismatchError` unless pages and their frames contain these cells; pages from index `retired` on need frames."""
        ...

    def require_logits(self, found: Seq[float], cells: Cells, *, exact: bool) -> None:
        """Raise `ShadowMismatchError` unless `found` are the logits after the cells; with `exact`, also those of a full prefill."""
        ...

    def likeliest(self, token: int, logits: Seq[float]) -> bool:
        """Return whether greedy decoding may sample this token: it is the most probable token, or equally probable."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShadowChunk:
    """The expected chunk: its cells, the number of exact cells at its beginning, and the operations that made the others approximate."""

    cells: Cells
    num_exact: int
    operations: tuple[str, ...] = ()

    @property
    def token_ids(self) -> list[int]:
        """The token ids in order."""
        return [cell.token for cell in self.cells]

    @property
    def gapped(self) -> bool:
        """Whether the positions have gaps."""
        return any(cell.position != at for at, cell in enumerate(self.cells))


@dataclass(slots=True)
class ChunkShadow:
    """Computes expected chunks: each method returns the chunk that the corresponding function must make."""

    oracle: Oracle
    known: dict[tuple[int, ...], Cell] = field(default_factory=dict)  # exact prefix -> the cell of its last token

    def exact(self, tokens: Iterable[int]) -> ShadowChunk:
        """Return the chunk of a full prefill."""
        cells: Cells = ()
        run: tuple[int, ...] = ()
        for at, token in enumerate(tokens):
            run = (*run, token)
            if run not in self.known:
                self.known[run] = Cell(token=token, position=at, kv=self.oracle.kv_of(cells, token, at))
            cells = (*cells, self.known[run])
        return ShadowChunk(cells=cells, num_exact=len(cells))

    def extended(self, base: ShadowChunk, tokens: Seq[int]) -> ShadowChunk:
        """Return a chunk followed by tokens that run at the positions after its last position."""
        if not base.operations:
            return self.exact([*base.token_ids, *tokens])
        cells = base.cells
        for token in tokens:
            position = cells[-1].position + 1
            cells = (*cells, Cell(token=token, position=position, kv=self.oracle.kv_of(cells, token, position)))
        return _labelled(cells, base.num_exact, base.operations)

    def cut(self, base: ShadowChunk, length: int) -> ShadowChunk:
        """Return the first `length` tokens of a chunk."""
        return _labelled(base.cells[:length], base.num_exact, base.operations)

    def composed(self, bases: Seq[ShadowChunk], recompute: int | float | str) -> ShadowChunk:
        """Return chunks composed one after another.

        A fraction as `recompute` runs all tokens of the later chunks again: the two layers that choose tokens are the whole model here.
        """
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
        """Return a chunk without the span `start ... stop - 1`."""
        head, tail = self.cut(base, start), base.cells[stop:]
        if not tail:
            return head
        if mode == "recompute":
            return self.extended(head, [cell.token for cell in tail]) if start else self.exact([cell.token for cell in tail])
        moved = _placed(tail, head.cells[-1].position + 1 if start else 0) if mode == "shift" else tail
        return _labelled(head.cells + moved, min(base.num_exact, start), _joined([base], f"dropped by {mode}"))

    def _rerun(self, cells: Cells, places: Iterable[int]) -> Cells:
        """Run the tokens at these indices again in place, in order."""
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
    """Return the same cells at positions `start, start + 1, ...`."""
    return tuple(Cell(token=cell.token, position=start + i, kv=cell.kv) for i, cell in enumerate(cells))
