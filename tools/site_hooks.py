"""What `mkdocs build` does to each page: links to files outside of docs/ lead to the repository, and those that lead nowhere are errors.

So the pages may link to sources, examples and results as they do where the repository itself is read.
"""

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
FENCE = re.compile(r"(^```.*?^```)", re.S | re.M)
log = logging.getLogger("mkdocs.hooks.site")


def outward(text: str, page: str, repository: str) -> str:
    """The text of a page with its links out of docs/ made absolute.

    Args:
        text: The page's Markdown.
        page: The page's path in docs/, such as `how-to/tune.md`.
        repository: The address of the repository, without a slash at its end.

    Returns:
        The Markdown with the addresses; code blocks are left alone.
    """

    def address(found: re.Match[str]) -> str:
        before, link, after = found.groups()
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
        if path.startswith("docs/"):
            return found[0]
        if not (ROOT / path).exists():
            log.warning("docs/%s links to %s, which does not exist", page, link)
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{before}{repository}/{kind}/main/{path}{after}"

    parts = FENCE.split(text)
    return "".join(part if index % 2 else LINK.sub(address, part) for index, part in enumerate(parts))


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Called by MkDocs for every page."""
    return outward(markdown, page.file.src_uri, config.repo_url.rstrip("/"))
