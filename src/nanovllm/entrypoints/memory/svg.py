"""A `MemoryReport` as a picture: figures, a bar of the pool, the map of the pages, and the tree of shared prefixes."""

from collections.abc import Iterable
from itertools import groupby
from math import log2

from nanovllm.entrypoints.display.svg import FAINT, INK, LINE, Length, document, rect, text
from nanovllm.entrypoints.display.tables import size
from nanovllm.entrypoints.memory.pages import PageFigures, PageRun
from nanovllm.entrypoints.memory.text import Cell, Family, Line, Look, cells_of, describe, listed, look_of, off_device, outline

WIDTH, MARGIN = 1000, 32
INNER = WIDTH - 2 * MARGIN
COLUMNS, CELLS, CELL = 64, 2048, 14.625  # of the map: cells per row, all cells at most, and their distance
STRIP, ROW, LETTER = 480, 24, 6.4  # of the tree: its width, the height of a line, and the width of a letter
WHOLE = 24  # longer nodes are drawn shortened, not page by page
SHADES: dict[Family, tuple[str, ...]] = {
    "chunk": ("#bcd7f0", "#7fb2e0", "#4a8dcb", "#2567a8", "#103f75"),
    "request": ("#fcd5a5", "#f9ae5f", "#ee8427", "#c75d0c", "#8a3d05"),
    "both": ("#d6cdec", "#b39fdb", "#9070c4", "#6c489f", "#462772"),
    "idle": ("#d3d6da",),
    "free": ("#f3f4f6",),
}
LEVELS = {1: "1", 2: "2", 3: "3-4", 5: "5-9", 10: "10+"}  # the smallest number of owners of each shade, and its mark
NAMES: dict[Family, str] = {
    "chunk": "chunks",
    "request": "requests",
    "both": "chunks and requests",
    "idle": "only in the index",
    "free": "free",
}


def draw(report: PageFigures) -> str:
    """The document of `MemoryReport.svg`."""
    parts: list[str] = []
    height = 30.0
    for section in (_head, _bar, _map, _tree):
        drawn, height = section(report, height)
        parts.extend(drawn)
    return document(WIDTH, height, f"{report.num_used:,} of {report.num_pages:,} pages used", parts)


def _head(report: PageFigures, top: Length) -> tuple[list[str], Length]:
    """The figures."""
    held, wanted = (size(count * report.page_bytes) for count in (report.num_held, report.num_references))
    cards = (
        (f"{report.num_used:,}", f"of {report.num_pages:,} pages used"),
        (f"{report.num_shared:,}", "pages shared"),
        (f"{report.saved_share:.2%}", f"of {report.num_references:,} pages saved"),
        (held, f"held instead of {wanted}"),
        (f"{report.num_idle:,}", "pages only in the index"),
    )
    parts = [text(MARGIN, top + 8, "KV memory", size=20, weight=600)]
    label = f"{report.page_size} tokens, {size(report.page_bytes)} per page{_frames(report)}"
    parts.append(text(WIDTH - MARGIN, top + 8, label, FAINT, anchor="end"))
    for i, (figure, what) in enumerate(cards):
        x = MARGIN + i * INNER / len(cards)
        parts += [text(x, top + 50, figure, size=24, weight=600), text(x, top + 69, what, FAINT)]
    return parts, top + 92


def _bar(report: PageFigures, top: Length) -> tuple[list[str], Length]:
    """The bar of the pool."""
    looks = [look_of(report, page) for page in range(report.num_pages)]
    families: tuple[Family, ...] = ("chunk", "both", "request", "idle", "free")
    parts, x = [], MARGIN
    for family in families:
        for shade, alike in groupby(sorted((look for look in looks if look.family == family), reverse=True), key=_fill):
            count = len(list(alike))
            width = INNER * count / report.num_pages
            parts.append(rect(x, top, width, 16, shade, f"{_pages(count)}: {NAMES[family]}"))
            x += width
    parts.append(f'<rect x="{MARGIN}" y="{top}" width="{INNER}" height="16" fill="none" stroke="{LINE}"/>')
    return parts, top + 48


def _map(report: PageFigures, top: Length) -> tuple[list[str], Length]:
    """The map of the pages."""
    cells = cells_of(report, CELLS, COLUMNS)
    per, stop = cells[0].stop - cells[0].start, cells[-1].stop
    title = "Pages, with the number of their owners" if per == 1 else f"Pages, {per} per cell, which shows most of them"
    parts = [text(MARGIN, top, title, size=14, weight=600)]
    top += 14
    for i, cell in enumerate(cells):
        x, y = MARGIN + i % COLUMNS * CELL, top + i // COLUMNS * CELL
        parts += _cell(x, y, CELL - 2, cell.look, _told(report, cell))
    top += -(-len(cells) // COLUMNS) * CELL + 6
    if stop < report.num_pages:
        parts.append(text(MARGIN, top + 8, f"and {report.num_pages - stop:,} more free pages", FAINT))
        top += 20
    legend, top = _legend(top + 6)
    return parts + legend, top + 40


def _legend(top: Length) -> tuple[list[str], Length]:
    """The colours and their families."""
    parts, x = [], MARGIN
    for family, name in NAMES.items():
        for (level, mark), shade in zip(LEVELS.items(), SHADES[family], strict=False):
            parts.append(rect(x, top, 22, 13, shade))
            if len(SHADES[family]) > 1:
                parts.append(_mark(x + 11, top + 9.5, mark, level > 2))
            x += 22
        parts.append(text(x + 6, top + 10.5, name, FAINT))
        x += 28 + 6.3 * len(name)
    return parts, top + 12


def _tree(report: PageFigures, top: Length) -> tuple[list[str], Length]:
    """The tree."""
    lines = outline(report)
    beside = off_device(report, 4)
    if not lines and not beside:
        return [], top - 16
    cut = any(line.run is not None and len(line.run.pages) > WHOLE for line in lines)
    title = "Chunks and requests; branches share the pages before them" + (f" (nodes above {WHOLE} pages shortened)" if cut else "")
    parts = [text(MARGIN, top, title, size=14, weight=600)]
    top += 14
    ends = _ends(lines)
    cell = min(CELL - 1, STRIP / max(ends, default=1))
    above: list[tuple[Length, Length]] = []  # of the last line per level: its end, and its middle
    for line, stop in zip(lines, ends, strict=True):
        level, y, end = len(line.trail) - 1, top + ROW / 2, MARGIN + stop * cell
        if line.run is not None:
            x = end - _length(line.run) * cell
            if level:
                parent_x, parent_y = above[level - 1]
                parts.insert(
                    1, f'<path d="M{parent_x:.1f} {parent_y:.1f}V{y:.1f}H{x:.1f}" fill="none" stroke="{LINE}" stroke-width="1.5"/>'
                )
            parts += _strip(report, line.run, x, y - 6.5, end - x, cell)
            above[level:] = [(end - cell / 2, y)]
        label, room = describe(report, line), int((WIDTH - MARGIN - end - 7) / LETTER)
        parts.append(text(end + 7, y + 4, _short(label, room), INK if line.run else FAINT, full=label))
        top += ROW
    for label in beside:
        parts.append(text(MARGIN, top + 16, _short(label, int(INNER / LETTER)), FAINT, full=label))
        top += ROW
    return parts, top + 24


def _length(run: PageRun) -> Length:
    """The drawn length of a node, in pages. Long nodes grow logarithmically, so that short ones stay visible."""
    count = len(run.pages)
    return count if count <= WHOLE else WHOLE * (1 + log2(count / WHOLE) / 6)


def _ends(lines: list[Line]) -> list[Length]:
    """The drawn end of each line, in pages."""
    ends: list[Length] = []
    above: list[Length] = []
    for line in lines:
        level = len(line.trail) - 1
        start = above[level - 1] if level else 0.0
        ends.append(start if line.run is None else start + _length(line.run))
        above[level:] = [ends[-1]]
    return ends


def _strip(report: PageFigures, run: PageRun, x: Length, y: Length, width: Length, cell: Length) -> Iterable[str]:
    """The pages of a node: one by one if there is room, otherwise grouped by look."""
    whole, each = len(run.pages) <= WHOLE and cell >= 5, width / len(run.pages)
    for look, alike in groupby(run.pages, key=lambda page: look_of(report, page)):
        pages = list(alike)
        for group in ([page] for page in pages) if whole else (pages,):
            label = f"page {group[0]}: {_owners(report, group[0])}" if len(group) == 1 else f"{_pages(len(group))}: {_looks(look)}"
            yield from _box(x, y, max(1.0, len(group) * each - 1.5 * whole), 13, look, label, cell >= 9)
            x += len(group) * each


def _cell(x: Length, y: Length, side: Length, look: Look, told: str) -> Iterable[str]:
    """One cell of the map."""
    return _box(x, y, side, side, look, told, True)


def _box(x: Length, y: Length, width: Length, height: Length, look: Look, told: str, marked: bool) -> Iterable[str]:
    """A coloured box with a tooltip, marked with its number of owners if `marked`."""
    yield rect(x, y, width, height, _fill(look), told, round=2 if width > 6 else 0, line="#dfe3e8" if look.family == "free" else None)
    if marked and 1 < look.num_owners < 100:
        yield _mark(x + width / 2, y + height / 2 + 3, str(look.num_owners), look.num_owners > 2)


def _fill(look: Look) -> str:
    """The shade of a look."""
    return SHADES[look.family][max(0, sum(look.num_owners >= level for level in LEVELS) - 1)]


def _told(report: PageFigures, cell: Cell) -> str:
    """The tooltip of a cell."""
    if cell.stop - cell.start == 1:
        return f"page {cell.start}: {_owners(report, cell.start)}"
    return f"pages {cell.start} to {cell.stop - 1}, most of them: {_looks(cell.look)}"


def _owners(report: PageFigures, page: int) -> str:
    """The owners of a page, or the name of its family."""
    owners = report.page_owners[page]
    return listed(owners, 6) if owners else NAMES[look_of(report, page).family]


def _looks(look: Look) -> str:
    """A look in words."""
    return f"{look.num_owners} of {NAMES[look.family]}" if look.num_owners else NAMES[look.family]


def _pages(count: int) -> str:
    """A number of pages in words."""
    return f"{count:,} page{'' if count == 1 else 's'}"


def _short(text: str, most: int) -> str:
    """The text, shortened to at most `most` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"


def _mark(x: Length, y: Length, count: str, dark: bool) -> str:
    """A number of owners, drawn in a box."""
    style = f'font-size="8.5" text-anchor="middle" fill="{"#ffffff" if dark else INK}" pointer-events="none"'
    return f'<text x="{x:.2f}" y="{y:.2f}" {style}>{count}</text>'


def _frames(report: PageFigures) -> str:
    """The frames in words, or nothing."""
    frames = report.frames
    return "" if frames is None else f"; {frames.num_needed:,} of {frames.num_frames:,} frames needed, {frames.num_spare:,} spare"
