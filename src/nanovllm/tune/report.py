"""What a tuning run found, as a table."""

from collections.abc import Sequence as Seq

from ..bench.report import aligned
from .run import Result

SHOWN = 3  # reasons for leaving candidates out


def table(results: Seq[Result]) -> str:
    """A row a kernel: microseconds of a launch by the default and by the cut chosen, and that cut; then what was left out."""
    head = ("part", "rows", "default us", "chosen us", "faster", "cut", "measured", "skipped")
    lines = aligned(head, [_row(result) for result in results])
    failed = [f"{r.work.part}, {r.work.rows} rows: not measured: {r.why}" for r in results if r.found is None]
    left = [f"{r.work.part}, {r.work.rows} rows, {_spelled(cut)}: {why}" for r in results if r.found for cut, why in r.found.skipped]
    more = [f"and {len(left) - SHOWN} more candidates that could not be used"] * (len(left) > SHOWN)
    return "\n".join([*lines, *failed, *left[:SHOWN], *more])


def verdict(results: Seq[Result]) -> str:
    """One sentence: how many kernels got another cut."""
    changed = sum(1 for result in results if result.found is not None and result.found.cut)
    return f"{changed} of {len(results)} kernels are faster by another cut than the default."


def _row(result: Result) -> tuple[str, ...]:
    where, found = (result.work.part, str(result.work.rows)), result.found
    if found is None:
        return (*where, "-", "-", "-", "-", "-", "-")
    gain = f"{100 * (1 - found.chosen_us / found.default_us):.0f}%" if found.cut else "-"
    times = (f"{found.default_us:,.2f}", f"{found.chosen_us:,.2f}", gain)
    return (*where, *times, _spelled(found.cut), str(found.measured), str(len(found.skipped)))


def _spelled(cut: tuple[int, ...]) -> str:
    return "default" if not cut else "library" if cut == (0,) else "x".join(map(str, cut))
