"""The settings of a server, and the bounds of what clients may ask for."""

from dataclasses import dataclass
from pathlib import Path

from nanovllm.errors import InvalidRequestError

MOST_DEPTH = 64  # of JSON
MOST_CONTAINERS = 100_000  # lists and objects of one body: each takes twenty times its three bytes of JSON
MOST_CHOICES = 128  # OpenAI's bound of `n`
MOST_ROWS = 2048  # prompts times choices of one request
MOST_TOKENS = 1024  # entries of `logit_bias`, and of `stop_token_ids`
MOST_LISTED = 1 << 17  # such entries of all rows of one request
MOST_INTERVAL = 1024  # tokens of one event
MOST_LOGPROBS = 1 << 22  # of all tokens of one answer: each takes some 100 bytes while its JSON is made


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one front end bears with. Times are seconds.

    Args:
        body_bytes: Of one request's body. A prompt of a million token ids as JSON has 8 MB.
        held_bytes: Of all bodies together that are being read.
        head_bytes: Of one request before its body.
        headers: Of one request.
        connections: That are open at the same time.
        head_seconds: For a request's head, and for a connection's first byte.
        body_seconds: For a request's body.
        keep_alive_seconds: Between two requests of a connection.
        stall_seconds: For a client that reads nothing of what was sent.
        ping_seconds: Between comments in a silent stream, which keep proxies from closing it.
        linger_seconds: For a refused client to read why, before the connection is closed.
    """

    body_bytes: int = 16 << 20
    held_bytes: int = 256 << 20
    head_bytes: int = 64 << 10
    headers: int = 100
    connections: int = 8192
    head_seconds: float = 10.0
    body_seconds: float = 30.0
    keep_alive_seconds: float = 75.0
    stall_seconds: float = 60.0
    ping_seconds: float = 15.0
    linger_seconds: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the operator of a server chooses.

    Args:
        host: The address to listen on.
        port: The port. 0: any free one.
        model_name: The name of the model in requests and answers.
        any_model_name: Whether requests may name any model.
        api_keys: SHA-256 digests of the keys of which each request must bring one. Empty: no key is needed.
        allowed_hosts: Names in the Host header that are served, besides `localhost`, the name in `host`, and any IP address. `"*"`: any.
        cors_origins: Origins of other sites' pages that may call, such as `"https://chat.example"`. `"*"`: any. Empty: none.
        shutdown_seconds: How long running requests may go on after SIGTERM.
        request_timeout: How many seconds a request may take, from its head to the end of its answer. None: as long as its client waits.
        max_waiting: How many requests may wait for the engine.
        max_waiting_tokens: How many tokens the prompts of waiting requests may have together; None: any number.
        stream_interval: How many tokens an event of a stream has. The first token is sent at once, and so is what is left at the end.
        metrics_names: `"nanovllm"` or `"vllm"`: the names of the metrics.
        chunk_dir: The folder of chunk files; None: chunks are not saved.
        keep_chunks: Whether chunks are saved at an orderly end, and loaded at the next start.
        max_chunks: How many chunks the clients of one key may have.
        chunk_share: The part of the KV memory that chunks may hold, all keys together.
        tool_parser: The format of tool calls: a name of `tools.formats.FORMATS`, "auto" for what the chat template tells, or "none".
        reasoning_parser: The format of think blocks: a name of `reasoning.REASONING_FORMATS`, "auto" or "none".
        page: Whether the chat page is at `/`.
        access_log: Whether each request gets a line on stderr.
        certificate: A file with the certificates of a TLS server, and the file of its private key. None: no TLS.
        limits: What one front end bears with.

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
    request_timeout: float | None = None
    max_waiting: int | None = 1024
    max_waiting_tokens: int | None = None
    stream_interval: int = 1
    metrics_names: str = "nanovllm"
    chunk_dir: Path | None = None
    keep_chunks: bool = False
    max_chunks: int = 256
    chunk_share: float = 0.5
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    page: bool = True
    access_log: bool = False
    certificate: tuple[str, str] | None = None
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidRequestError(f"port={self.port} must be in [0, 65535]")
        for name in ("max_waiting", "max_waiting_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequestError(f"{name}={value} must be at least 1, or None")
        if not 1 <= self.stream_interval <= MOST_INTERVAL:
            raise InvalidRequestError(f"stream_interval={self.stream_interval} must be in [1, {MOST_INTERVAL}]")
        if self.keep_chunks and self.chunk_dir is None:
            raise InvalidRequestError("--keep-chunks needs a folder: give --chunk-dir, or --kv-dir, which keeps chunks too")
        if self.max_chunks < 0:
            raise InvalidRequestError(f"max_chunks={self.max_chunks} must be at least 0")
        if not 0 <= self.chunk_share <= 1:
            raise InvalidRequestError(f"chunk_share={self.chunk_share} must be in [0, 1]")
        if not 0 <= self.shutdown_seconds < float("inf"):
            raise InvalidRequestError(f"shutdown_seconds={self.shutdown_seconds} must be a number of at least 0")
        if self.request_timeout is not None and not 0 < self.request_timeout < float("inf"):
            raise InvalidRequestError(f"request_timeout={self.request_timeout} must be a number above 0, or None")
        if self.metrics_names not in ("nanovllm", "vllm"):
            raise InvalidRequestError(f"metrics_names={self.metrics_names!r} must be 'nanovllm' or 'vllm'")
