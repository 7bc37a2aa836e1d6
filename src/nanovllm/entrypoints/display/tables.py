"""Tables of aligned columns, sizes and shortened lists, as every command prints them."""

from collections.abc import Iterable, Sequence

Cells = tuple[str, ...]
WORDS = ("", "workload", "kernel", "op")  # columns of words


def shortened(lines: Iterable[str], most: int = 8) -> list[str]:
    """The first of many lines, and how many more there are."""
    found = list(lines)
    return [*found[:most], *[f"and {len(found) - most} more"] * (len(found) > most)]


def aligned(head: Cells, rows: Sequence[Cells]) -> list[str]:
    """Columns for a terminal: words to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    flush = [name in WORDS for name in head]
    lines = [[c.ljust(w) if left else c.rjust(w) for c, w, left in zip(line, widths, flush, strict=True)] for line in (head, *rows)]
    return ["  ".join(line).rstrip() for line in lines]


def size(count: int) -> str:
    """Bytes in the unit that suits them."""
    power = min(max(0, count.bit_length() - 1) // 10, 4)
    return f"{count} B" if not power else f"{count / 1024**power:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"
