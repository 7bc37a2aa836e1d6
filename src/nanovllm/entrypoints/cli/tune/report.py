"""The results of a tuning run as a table."""

from collections.abc import Sequence as Seq

from nanovllm.entrypoints.cli.tune.kernel_search import Found
from nanovllm.entrypoints.cli.tune.sweep import Result
from nanovllm.entrypoints.display.tables import aligned

SHOWN = 3  # most skipped candidates that are listed with a reason


def table(results: Seq[Result]) -> str:
    """The results in aligned columns, then the candidates that could not be used.

    For each batch size, the first row has microseconds of a layer with all defaults and with all chosen tile configurations. The next rows
    have microseconds of a layer with the default and with the chosen tile configuration of one kernel. The head's time is that of its
    own launch.
    """
    head = ("part", "rows", "default us", "chosen us", "faster", "tiles", "measured", "skipped")
    each = [(part, result, found) for result in results for part, found in result.lines]
    lines = aligned(head, [_row(part, result.rows, found) for part, result, found in each])
    failed = [f"{part}, {result.rows} rows: not measured: {result.why}" for part, result, found in each if found is None]
    left = [f"{part}, {result.rows} rows, {_spelled(cut)}: {why}" for part, result, found in each if found for cut, why in found.skipped]
    more = [f"and {len(left) - SHOWN} more candidates that could not be used"] * (len(left) > SHOWN)
    return "\n".join([*lines, *failed, *left[:SHOWN], *more])


def verdict(results: Seq[Result]) -> str:
    """One sentence: how many kernels got another tile configuration."""
    kernels = [found for result in results for part, found in result.lines if part != "layer"]
    changed = sum(1 for found in kernels if found is not None and found.cut)
    return f"{changed} of {len(kernels)} kernels have a tile configuration other than the default."


def _row(part: str, rows: int, found: Found | None) -> tuple[str, ...]:
    where = (part, str(rows))
    if found is None:
        return (*where, "-", "-", "-", "-", "-", "-")
    whole = part == "layer"
    gain = f"{100 * (1 - found.chosen_us / found.default_us):.1f}%" if whole or found.cut else "-"
    tried = ("-", "-", "-") if whole else (_spelled(found.cut), str(found.measured), str(len(found.skipped)))
    return (*where, f"{found.default_us:,.2f}", f"{found.chosen_us:,.2f}", gain, *tried)


def _spelled(cut: tuple[int, ...]) -> str:
    return "default" if not cut else "library" if cut == (0,) else "x".join(map(str, cut))
