"""Values as HTML, as a notebook shows them: a text, and a table of figures. The colours are the notebook's own."""

from collections.abc import Sequence as Seq
from html import escape


def card(title: str, figures: Seq[tuple[str, object]], text: str | None = None) -> str:
    """Return HTML of a title, figures by name, and a text whose white space counts. Everything is escaped.

    Examples:
        >>> card("Chunk", [("tokens", 4)])
        '<div><b>Chunk</b><table><tr><th style="text-align:left">tokens</th><td style="text-align:left">4</td></tr></table></div>'
    """
    rows = "".join(f"<tr>{_cell('th', name)}{_cell('td', value)}</tr>" for name, value in figures)
    shown = "" if text is None else f'<pre style="white-space:pre-wrap">{escape(text)}</pre>'
    return f"<div><b>{escape(title)}</b>{shown}<table>{rows}</table></div>"


def _cell(kind: str, value: object) -> str:
    return f'<{kind} style="text-align:left">{escape(str(value))}</{kind}>'
