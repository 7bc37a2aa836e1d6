"""Progress bars: on stderr, where that is a terminal, and nowhere else."""

import sys
from typing import Any

from tqdm import tqdm


def bar(total: int, what: str, unit: str, *, progress: bool | None = None) -> "tqdm[Any]":
    """A bar over `total` steps, to be used in a `with` block. `progress`: None draws it only where stderr is a terminal."""
    shown = sys.stderr.isatty() if progress is None else progress
    return tqdm(total=total, desc=what, unit=unit, disable=not shown, leave=False, dynamic_ncols=True)
