"""Who may call: hosts, API keys, and pages of other sites."""

import hashlib
import hmac
from ipaddress import ip_address

from nanovllm.entrypoints.server.errors import ApiError
from nanovllm.entrypoints.server.exchange import RETRY, Exchange
from nanovllm.entrypoints.server.settings import Settings

OPEN = frozenset({"/health", "/ping"})  # paths that need no key
PAGE = "/page/"  # the files of the chat page, which asks for a key itself
METHODS = b"GET, POST, DELETE"
PREFLIGHT_SECONDS = b"600"
MOST_ASKED = 2048  # bytes of a preflight's list of headers


def admit(exchange: Exchange, settings: Settings, *, draining: bool) -> None:
    """Refuse those who may not call, and note whose KV the request may share.

    Raises:
        ApiError: With the reason.
    """
    hosts, path = [value for name, value in exchange.scope["headers"] if name == b"host"], exchange.scope["path"]
    if len(hosts) > 1 or (not hosts and exchange.scope["http_version"] != "1.0"):
        raise ApiError(400, f"the request has {len(hosts)} Host headers, not one")
    host = hosts[0].decode("latin-1") if hosts else ""
    if hosts and not host_allowed(host, settings):  # another site's name that resolves to this address (DNS rebinding)
        raise ApiError(403, f"the host {host[:100]!r} is not served here: see --allowed-host", code="host_not_allowed")
    if path in OPEN:
        return
    if draining:
        headers = (("connection", "close"), *RETRY)
        raise ApiError(503, "the server is shutting down", type="server_error", code="shutting_down", headers=headers)
    if settings.page and (path == "/" or path.startswith(PAGE)):
        return
    if settings.api_keys:
        place = place_of_key(exchange, settings.api_keys)
        if place is None:
            headers = (("www-authenticate", "Bearer"),)
            raise ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key", headers=headers)
        exchange.namespace = place + 1


def host_allowed(host: str, settings: Settings) -> bool:
    """Whether a Host header names this server. IP addresses do: no other site has them as its name."""
    name, _, port = host[1:].partition("]") if host.startswith("[") else host.partition(":")
    name, port = name.lower().rstrip("."), port.removeprefix(":")
    if port and not (port.isascii() and port.isdigit()):
        return False
    if name in ("localhost", settings.host.lower()) or "*" in settings.allowed_hosts or name in settings.allowed_hosts:
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def given_digest(exchange: Exchange) -> bytes:
    """The digest of the key that a request brings."""
    scheme, _, key = (exchange.header(b"authorization") or b"").partition(b" ")
    if scheme.lower() != b"bearer":
        key = exchange.header(b"x-api-key") or b""
    return hashlib.sha256(key.strip()).digest()


def place_of_key(exchange: Exchange, digests: tuple[bytes, ...]) -> int | None:
    """Which of the keys a request brings. The time that a refusal takes tells nothing of them."""
    digest = given_digest(exchange)
    same = [hmac.compare_digest(digest, other) for other in digests]
    return same.index(True) if any(same) else None


def cors_headers(exchange: Exchange, settings: Settings) -> list[tuple[bytes, bytes]]:
    """The headers that let a page of an allowed origin read the answer. Cookies are never allowed."""
    origin = exchange.header(b"origin")
    if origin is None or not settings.cors_origins:
        return []
    vary = (b"vary", b"origin")
    if "*" not in settings.cors_origins and origin.decode("latin-1") not in settings.cors_origins:
        return [vary]
    allowed = b"*" if "*" in settings.cors_origins else origin
    exposed = (b"access-control-expose-headers", b"x-request-id, retry-after")
    return [vary, (b"access-control-allow-origin", allowed), exposed]


def preflight(exchange: Exchange) -> list[tuple[bytes, bytes]] | None:
    """Further headers of the answer to a browser that asks whether a page may call. None: it does not ask, or the page may not."""
    asks = exchange.scope["method"] == "OPTIONS" and exchange.header(b"access-control-request-method") is not None
    if not asks or not any(name == b"access-control-allow-origin" for name, _ in exchange.headers):
        return None
    asked = exchange.header(b"access-control-request-headers") or b""
    named = len(asked) <= MOST_ASKED and all(c in b"-_, " or chr(c).isalnum() for c in asked)
    headers = asked if asked and named else b"authorization, content-type, x-api-key, x-request-id"
    return [
        (b"access-control-allow-methods", METHODS),
        (b"access-control-allow-headers", headers),
        (b"access-control-max-age", PREFLIGHT_SECONDS),
    ]
