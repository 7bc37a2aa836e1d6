"""The settings of a server, and the bounds of what clients may ask for."""

from dataclasses import dataclass
from pathlib import Path

from nanovllm.errors import InvalidRequestError

MOST_BODY_BYTES = 16 << 20  # a prompt of a million token ids as JSON has 8 MB
MOST_HEADER_BYTES = 64 << 10  # in all, as CVE-2025-48956 asks for a bound
MOST_HEADERS = 100
MOST_DEPTH = 64  # of JSON
MOST_CHOICES = 128  # OpenAI's bound of `n`
MOST_ROWS = 2048  # prompts times choices of one request
HEADER_SECONDS = 10.0  # for a request's head, and for a connection's first byte
BODY_SECONDS = 30.0  # for a request's body
KEEP_ALIVE_SECONDS = 75
STALL_SECONDS = 60.0  # for a client that does not read
PING_SECONDS = 15.0  # between comments in a silent stream, which keep proxies from closing it
MOST_CONNECTIONS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the operator of a server chooses.

    Args:
        host: The address to listen on.
        port: The port. 0: any free one.
        model_name: The name of the model in requests and answers.
        any_model_name: Whether requests may name any model.
        api_keys: SHA-256 digests of the keys of which each request must bring one. Empty: no key is needed.
        allowed_hosts: Values of the Host header that are served, besides addresses of the loopback interface. `"*"`: any.
        cors_origins: Origins of other sites' pages that may call. Empty: none.
        shutdown_seconds: How long running requests may go on after SIGTERM.
        max_waiting: How many requests may wait for the engine.
        max_waiting_tokens: How many tokens the prompts of waiting requests may have together; None: any number.
        metrics_names: `"nanovllm"` or `"vllm"`: the names of the metrics.
        chunk_dir: The folder of chunk files; None: chunks are not saved.
        max_chunks: How many chunks the clients of one key may have.
        chunk_share: The part of the KV memory that chunks may hold, all keys together.
        tool_parser: The format of tool calls: a name of `tools.formats.FORMATS`, "auto" for what the chat template tells, or "none".
        reasoning_parser: The format of think blocks: a name of `reasoning.REASONING_FORMATS`, "auto" or "none".

    Raises:
        InvalidRequestError: A value is invalid.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str = "tiny"
    any_model_name: bool = False
    api_keys: tuple[bytes, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    shutdown_seconds: float = 30.0
    max_waiting: int | None = 1024
    max_waiting_tokens: int | None = None
    metrics_names: str = "nanovllm"
    chunk_dir: Path | None = None
    max_chunks: int = 256
    chunk_share: float = 0.5
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidRequestError(f"port={self.port} must be in [0, 65535]")
        for name in ("max_waiting", "max_waiting_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequestError(f"{name}={value} must be at least 1, or None")
        if self.max_chunks < 0:
            raise InvalidRequestError(f"max_chunks={self.max_chunks} must be at least 0")
        if not 0 <= self.chunk_share <= 1:
            raise InvalidRequestError(f"chunk_share={self.chunk_share} must be in [0, 1]")
        if not 0 <= self.shutdown_seconds < float("inf"):
            raise InvalidRequestError(f"shutdown_seconds={self.shutdown_seconds} must be a number of at least 0")
        if self.metrics_names not in ("nanovllm", "vllm"):
            raise InvalidRequestError(f"metrics_names={self.metrics_names!r} must be 'nanovllm' or 'vllm'")
