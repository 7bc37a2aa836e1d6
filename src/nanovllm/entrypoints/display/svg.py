"""SVG pictures from strings: a document, rectangles and text, in one common style."""

from collections.abc import Iterable
from typing import TypeAlias
from xml.sax.saxutils import escape

from nanovllm.entrypoints.display.terminal import clean

Length: TypeAlias = "int | float"  # units of the picture, about a pixel
INK, FAINT, LINE = "#1f2933", "#6b7683", "#c3cad2"
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


def document(width: Length, height: Length, title: str, parts: Iterable[str]) -> str:
    """A whole picture of this size on white, with a title for screen readers."""
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" width="{width}" height="{height:.0f}" '
        f'font-family="{FONT}" font-size="12" fill="{INK}">\n<title>{safe(title)}</title>\n'
        f'<rect width="{width}" height="{height:.0f}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def rect(
    x: Length, y: Length, width: Length, height: Length, fill: str, told: str = "", *, round: Length = 0, line: str | None = None
) -> str:
    """A rectangle. `told` is its tooltip."""
    shape = f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{fill}"'
    shape += (f' rx="{round}"' if round else "") + (f' stroke="{line}" stroke-width="0.75"' if line else "")
    return f"{shape}><title>{safe(told)}</title></rect>" if told else f"{shape}/>"


def text(
    x: Length,
    y: Length,
    words: str,
    fill: str = INK,
    *,
    size: Length = 12,
    weight: int = 400,
    anchor: str = "start",
    full: str | None = None,
) -> str:
    """A line of text. `full` is its tooltip, if it differs from the text."""
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{fill}"'
    hover = f"<title>{safe(full)}</title>" if full is not None and full != words else ""
    return f'<text x="{x:.2f}" y="{y:.2f}" {style}>{hover}{safe(words)}</text>'


def safe(text: str) -> str:
    """Text escaped for XML, with invalid characters replaced."""
    return escape("".join(char if char not in "\ufffe\uffff" else "\ufffd" for char in clean(text)))
