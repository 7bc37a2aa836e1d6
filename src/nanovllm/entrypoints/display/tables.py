"""Tables of aligned columns, sizes and shortened lists for all commands."""

from collections.abc import Collection, Iterable, Sequence

Cells = tuple[str, ...]
WORDS = ("", "workload", "kernel", "op")  # titles of columns that are words


def shortened(lines: Iterable[str], most: int = 8) -> list[str]:
    """The first `most` lines, and the number of the others."""
    every = list(lines)
    return [*every[:most], *[f"and {len(every) - most} more"] * (len(every) > most)]


def aligned(head: Cells, rows: Sequence[Cells], left: Collection[int] | None = None) -> list[str]:
    """Columns for a terminal, the head first.

    Args:
        head: The names of the columns.
        rows: The cells of each row.
        left: The columns that are aligned to the left; the others are aligned to the right. None: the columns of words, by their names.

    Returns:
        A line for the head and for each row.
    """
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    left = [i for i, name in enumerate(head) if name in WORDS] if left is None else left
    cells = ([c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))] for line in (head, *rows))
    return ["  ".join(line).rstrip() for line in cells]


def size(count: int) -> str:
    """A number of bytes with a suitable unit."""
    power = min(max(0, count.bit_length() - 1) // 10, 4)
    return f"{count} B" if not power else f"{count / 1024**power:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"
