"""Tables of aligned columns, sizes and shortened lists for all commands."""

from collections.abc import Iterable, Sequence

Cells = tuple[str, ...]
WORDS = ("", "workload", "kernel", "op")  # titles of columns that are words


def shortened(lines: Iterable[str], most: int = 8) -> list[str]:
    """The first `most` lines, and the number of the others."""
    every = list(lines)
    return [*every[:most], *[f"and {len(every) - most} more"] * (len(every) > most)]


def aligned(head: Cells, rows: Sequence[Cells]) -> list[str]:
    """Aligned lines for a terminal: columns of words to the left, columns of numbers to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    flush = [name in WORDS for name in head]
    lines = [[c.ljust(w) if left else c.rjust(w) for c, w, left in zip(line, widths, flush, strict=True)] for line in (head, *rows)]
    return ["  ".join(line).rstrip() for line in lines]


def size(count: int) -> str:
    """A number of bytes with a suitable unit."""
    power = min(max(0, count.bit_length() - 1) // 10, 4)
    return f"{count} B" if not power else f"{count / 1024**power:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"
