"""The chat page: static files of the package, served at `/` and below `/page/`. It asks no other host for anything."""

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from nanovllm.entrypoints.server.app import Handler, Server
from nanovllm.entrypoints.server.errors import ApiError
from nanovllm.entrypoints.server.exchange import Exchange

KINDS = {"css": b"text/css; charset=utf-8", "js": b"text/javascript; charset=utf-8", "html": b"text/html; charset=utf-8"}
START = "index.html"
FIRST = "theme.js"  # no module: it runs before the first paint
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; base-uri 'none'; "
    b"form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS = (
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
ASK_AGAIN = (b"cache-control", b"no-cache")
KEEP = (b"cache-control", b"public, max-age=31536000, immutable")  # the digest of all files is a part of their path


@dataclass(frozen=True, slots=True)
class Page:
    """The files of the page.

    Attributes:
        start: The document, in which the digest is filled in.
        digest: Of the files. Other files have other addresses, so that browsers may keep them.
        files: By their path below the digest: content type and bytes.
    """

    start: bytes
    digest: str
    files: dict[str, tuple[bytes, bytes]]


@cache
def page() -> Page:
    """The page, read from the package at the first call."""
    found = dict(sorted(_found(files("nanovllm") / "assets" / "page")))
    digest = hashlib.sha256(b"".join(b"%s\0%d\0%s" % (name.encode(), len(data), data) for name, data in found.items())).hexdigest()[:16]
    start = found.pop(START).decode()
    ahead = "\n".join(f'<link rel="modulepreload" href="page/{digest}/{name}">' for name in found if name.endswith(".js") and name != FIRST)
    start = start.replace("<!-- modules -->", ahead).replace("FILES", f"page/{digest}")
    return Page(start.encode(), digest, {name: (KINDS[name.rpartition(".")[2]], data) for name, data in found.items()})


def _found(folder: Traversable, before: str = "") -> list[tuple[str, bytes]]:
    """The files of a folder and of those in it that a browser reads."""
    found = []
    for one in folder.iterdir():
        if one.is_dir():
            found += _found(one, f"{before}{one.name}/")
        elif one.name.rpartition(".")[2] in KINDS:
            found.append((before + one.name, one.read_bytes()))
    return found


async def show(server: Server, exchange: Exchange) -> None:
    """`GET /`: the page."""
    await exchange.respond(200, page().start, kind=KINDS["html"], headers=(*HEADERS, ASK_AGAIN))


async def file(server: Server, exchange: Exchange) -> None:
    """`GET /page/{digest}/{name}`: one of its files.

    Raises:
        ApiError: There is no such file, or it is of another version.
    """
    asked, here = exchange.scope["path_params"], page()
    if asked["digest"] != here.digest or asked["name"] not in here.files:
        raise ApiError(404, f"the page has no file {asked['name'][:200]!r}: reload it", code="not_found")
    kind, data = here.files[asked["name"]]
    await exchange.respond(200, data, kind=kind, headers=(*HEADERS, KEEP))


PAGE_ROUTES: tuple[tuple[str, tuple[str, ...], Handler], ...] = (
    ("/", ("GET",), show),
    ("/page/{digest}/{name:path}", ("GET",), file),
)
