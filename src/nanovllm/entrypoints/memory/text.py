"""A `MemoryReport` as text, and the parts that text and picture share: looks of pages, cells of the map, lines of the tree."""

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

from nanovllm.entrypoints.display.tables import size
from nanovllm.entrypoints.display.terminal import clean
from nanovllm.entrypoints.memory.pages import PageFigures, PageOwner, PageRun, ranges

Family = Literal["free", "idle", "chunk", "request", "both"]
WIDTH, ROWS = 64, 32  # cells of the map
BRANCHES, LINES = 8, 64  # of the tree: the largest number of branches per node, and of lines
COLORS = {"free": "2", "idle": "2", "chunk": "34", "request": "33", "both": "35"}
LEGEND = ". free   - only in the index   c a chunk's   r a request's   2-9 owners   # more owners"


@dataclass(frozen=True, slots=True, order=True)
class Look:
    """How a page is shown: the number of its owners, and their family."""

    num_owners: int
    family: Family


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Pages `start ... stop - 1` as one cell of the map, with the look that most of them have."""

    start: int
    stop: int
    look: Look


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Line:
    """One line of the tree: a node, or several nodes that are only counted.

    Attributes:
        trail: For each level down to this line, whether its branch is the last one.
        run: The node, or None.
        hidden: The nodes that are only counted.
        start: The number of pages before the node.
    """

    trail: tuple[bool, ...]
    run: PageRun | None
    hidden: tuple[PageRun, ...] = ()
    start: int


def look_of(report: PageFigures, page: int) -> Look:
    """The look of a page."""
    owners = report.page_owners[page]
    if not owners:
        return Look(0, "idle" if page in report.idle else "free")
    chunks = sum(owner.kind == "chunk" for owner in owners)
    return Look(len(owners), "chunk" if chunks == len(owners) else "both" if chunks else "request")


def cells_of(report: PageFigures, most: int, width: int) -> list[Cell]:
    """The cells of the map, without whole rows of free pages at its end.

    A cell has one page, or the smallest power of two of pages for which at most `most` cells suffice.
    """
    looks = [look_of(report, page) for page in range(report.num_pages)]
    used = max((page + 1 for page, look in enumerate(looks) if look.family != "free"), default=0)
    per = 1
    while -(-used // per) > most:
        per *= 2
    row = per * width
    stop = min(report.num_pages, max(1, -(-used // row)) * row)
    return [_cell(looks, start, min(start + per, stop)) for start in range(0, stop, per)]


def _cell(looks: list[Look], start: int, stop: int) -> Cell:
    """The cell of a range of pages."""
    counts = Counter(looks[start:stop])
    return Cell(start=start, stop=stop, look=max(counts, key=lambda look: (counts[look], look)))


def outline(report: PageFigures) -> list[Line]:
    """The lines of the tree. Of many branches only the first are shown, and of a long tree only its beginning; the rest is counted."""
    roots: list[int] = []
    children: list[list[int]] = [[] for _ in report.runs]
    for i, run in enumerate(report.runs):
        (roots if run.parent is None else children[run.parent]).append(i)
    stops = list(range(1, len(report.runs) + 1))  # the index after each node and all its descendants
    for run, stop in zip(reversed(report.runs), reversed(stops), strict=True):
        if run.parent is not None:
            stops[run.parent] = max(stops[run.parent], stop)
    lines: list[Line] = []
    left: list[tuple[int, int, tuple[bool, ...]]] = []

    def push(branches: list[int], trail: tuple[bool, ...]) -> None:
        shown = branches if len(branches) <= BRANCHES + 1 else branches[:BRANCHES]
        if len(shown) < len(branches):
            left.append((branches[len(shown)], stops[branches[-1]], (*trail, True)))
        left.extend((i, i, (*trail, i == branches[-1])) for i in reversed(shown))

    push(roots, ())
    while left:
        first, stop, trail = left.pop()
        run = report.runs[first]
        if len(lines) == LINES:  # nodes are in the order of the lines, so the rest starts here
            return [*lines, Line(trail=(True,), run=None, hidden=report.runs[first:], start=0)]
        if stop > first:
            lines.append(Line(trail=trail, run=None, hidden=report.runs[first:stop], start=run.start))
        else:
            lines.append(Line(trail=trail, run=run, start=run.start))
            push(children[first], trail)
    return lines


def describe(report: PageFigures, line: Line) -> str:
    """The text of a line of the tree: its pages, and the owners that end there."""
    if line.run is None:
        pages = {page for run in line.hidden for page in run.pages}
        return f"... {_count(len(line.hidden), 'more run')}: {_count(len(pages), 'page')}"
    run, count = line.run, len(line.run.pages)
    words = _count(count, "page")
    elsewhere = sum(len(report.page_owners[page]) > len(run.owners) for page in run.pages)
    if elsewhere:
        words += " (also held elsewhere)" if elsewhere == count else f" ({elsewhere:,} also held elsewhere)"
    if len(run.owners) > 1:
        words += f", {len(run.owners):,} owners"
    if not run.owners:
        words += ", only in the index" if report.idle.issuperset(run.pages) else ", in the index"
    return f"{words}: {listed(run.ends, 2)}" if run.ends else words


def listed(owners: Seq[PageOwner], most: int) -> str:
    """The names of the first `most` owners, and the number of the others."""
    rest = len(owners) - most
    return "; ".join([clean(str(owner)) for owner in owners[:most]] + ([f"{rest:,} more"] if rest > 0 else []))


def figures(report: PageFigures) -> list[str]:
    """The sums as lines: pages used, pages saved, and frames if there are some."""
    both = f", {report.num_both:,} of these by both" if report.num_both else ""
    by = f"{report.num_chunk:,} held by chunks, {report.num_request:,} by requests{both}, {report.num_idle:,} only in the index"
    used = f"{report.num_used:,} of {_count(report.num_pages, 'page')} used ({by}), {report.num_free:,} free"
    saved = f"{report.num_saved:,} of {_count(report.num_references, 'page')} saved ({report.saved_share:.2%})"
    held, wanted = (size(count * report.page_bytes) for count in (report.num_held, report.num_references))
    lines = [used, f"{report.num_shared:,} shared; {saved}: {held} held instead of {wanted}, {size(report.page_bytes)} per page"]
    if report.num_host_pages:
        host = f"{report.num_host_used:,} of {_count(report.num_host_pages, 'page')} of host memory used"
        lines.append(f"{host} ({size(report.num_host_used * report.page_bytes)})")
    if (disk := report.disk) is not None:
        counts = disk.counts
        failed = f"{counts.pages_damaged + counts.frames_damaged:,} damaged, {counts.errors:,} errors"
        files = _count(disk.num_pages, "page") + (f" and {_count(disk.num_frames, 'frame')}" if disk.num_frames else "")
        lines.append(
            f"{files} on disk; all take {size(disk.num_bytes)} of {size(disk.max_bytes)}; "
            f"{counts.pages_written + counts.frames_written:,} written, {counts.pages_read + counts.frames_read:,} read, {failed}"
        )
    if (frames := report.frames) is not None:
        what = f"{_count(frames.num_frames, 'frame')} for layers with windows, {size(frames.frame_bytes)} each"
        use = f"{frames.num_needed:,} needed, {frames.num_spare:,} spare, {frames.num_free:,} free"
        lines.append(f"{what}: {use}; windows save {frames.num_saved:,} ({size(frames.num_saved * frames.frame_bytes)})")
    return lines


def draw(report: PageFigures, *, color: bool) -> str:
    """The text of `MemoryReport.text`."""
    lines = [*figures(report), "", *_map(report, color)]
    tree = [_lead(line.trail) + _places(line) + describe(report, line) for line in outline(report)]
    beside = off_device(report, BRANCHES)
    if tree:
        lines += ["", *tree]
    if beside:
        lines += ["", *beside]
    return "\n".join(lines)


def off_device(report: PageFigures, most: int) -> list[str]:
    """The owners that have no page of the device: chunks in host memory, and requests without KV. Each kind is a line if there is one."""
    empty = [owner for owner in report.owners if not owner.pages]
    moved = [owner for owner in empty if owner.kind == "chunk"]  # a chunk has a page at least, here or there
    others = [owner for owner in empty if owner.kind != "chunk"]
    return [f"{where}: {listed(some, most)}" for where, some in (("in host memory", moved), ("without pages", others)) if some]


def _map(report: PageFigures, color: bool) -> list[str]:
    """The lines of the map."""
    cells = cells_of(report, WIDTH * ROWS, WIDTH)
    per, stop = cells[0].stop - cells[0].start, cells[-1].stop
    digits = len(str(cells[-1].start))
    rows = [cells[i : i + WIDTH] for i in range(0, len(cells), WIDTH)]
    lines = [f"{row[0].start:>{digits}}  {''.join(_styled(cell.look, color) for cell in row)}" for row in rows]
    if stop < report.num_pages:
        lines.append(f"{'':{digits}}  ... {_count(report.num_pages - stop, 'more free page')}")
    scale = [] if per == 1 else [f"each character is {per} pages, and shows most of them"]
    return [*lines, *scale, LEGEND]


def _styled(look: Look, color: bool) -> str:
    """The character of a cell, in its colour."""
    if look.num_owners < 2:
        shown = {"free": ".", "idle": "-", "chunk": "c", "request": "r"}[look.family]
    else:
        shown = str(look.num_owners) if look.num_owners < 10 else "#"
    return f"\x1b[{COLORS[look.family]}m{shown}\x1b[0m" if color else shown


def _lead(trail: tuple[bool, ...]) -> str:
    """The branches that precede a line of the tree."""
    if len(trail) < 2:
        return ""
    return "".join("   " if last else "│  " for last in trail[1:-1]) + ("└─ " if trail[-1] else "├─ ")


def _places(line: Line) -> str:
    """The page numbers of a line."""
    return "" if line.run is None else f"[{ranges(line.run.pages, 3)}] "


def _count(number: int, what: str) -> str:
    """A number with its noun, in the plural if needed."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
