"""`nanovllm serve`: a server with OpenAI's interface."""

import argparse
import hashlib
import os
import socket
import ssl
import stat
import sys
import warnings
from contextlib import nullcontext, suppress
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import torch

from nanovllm.entrypoints.arguments import add_model_options, add_ranks, as_typed, engine_limits, folder, positive, rounding, source
from nanovllm.entrypoints.server.chunk_lock import only_server
from nanovllm.entrypoints.server.settings import Settings
from nanovllm.entrypoints.server.starting import FAILED
from nanovllm.errors import InvalidRequestError
from nanovllm.files import as_path
from nanovllm.loading.hub import resolve_folder

DESCRIPTION = """\
Serve a model over HTTP with OpenAI's interface: /v1/completions, /v1/chat/completions, /v1/models, /health. Any client of OpenAI's works
with base_url=http://127.0.0.1:8000/v1.
"""
NEEDED = ("starlette", "uvicorn", "uvloop", "httptools", "msgspec", "prometheus_client")
KEYS = "NANOVLLM_API_KEY"
WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")  # variables that say how the threads of OpenMP wait
SPINS = "1000"  # turns of a waiting thread before it sleeps: a few microseconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("name", nargs="?", metavar="MODEL", help="the same as --model (default: tiny, the packaged model)")
    add_model_options(parser)
    parser.set_defaults(model=None)  # so that a --model tiny beside MODEL is seen
    add_ranks(parser)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", metavar="A", help="the address to listen on (default: 127.0.0.1, this machine alone)")
    group.add_argument("--port", type=int, default=8000, metavar="N", help="the port; 0: any free one (default: 8000)")
    group.add_argument("--model-name", metavar="NAME", help="the model's name for clients (default: the last part of --model)")
    group.add_argument("--any-model-name", action="store_true", help="answer requests that name any other model, too")
    keys = f"a file with an API key a line, of which requests must bring one; or the variable {KEYS} with one key"
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help=keys)
    group.add_argument("--ssl-certfile", metavar="FILE", help="the certificate chain of a TLS server, in PEM; with --ssl-keyfile")
    group.add_argument("--ssl-keyfile", metavar="FILE", help="the private key of the certificate, in PEM")
    origins = "the origin of another site's pages that may call, such as https://chat.example; * for any; may be repeated (default: none)"
    group.add_argument("--cors-origin", action="append", default=[], metavar="URL", help=origins)
    hosts = "a name under which clients reach this server, besides localhost, --host and any IP address; * for any; may be repeated"
    group.add_argument("--allowed-host", action="append", default=[], metavar="NAME", help=hosts)
    group.add_argument("--workers", type=positive, default=1, metavar="N", help="processes that answer HTTP (default: 1)")
    group.add_argument("--max-num-seqs", type=positive, default=256, metavar="N", help="requests that run at the same time (default: 256)")
    group.add_argument("--max-waiting", type=positive, default=1024, metavar="N", help="requests that may wait; more get status 429")
    group.add_argument("--max-waiting-tokens", type=positive, metavar="N", help="prompt tokens of waiting requests; more get status 429")
    for name, what in (("tool", "tool calls"), ("reasoning", "think blocks")):
        told = f"the format of {what}; none: they are plain text (default: auto, what the chat template tells)"
        group.add_argument(f"--{name}-parser", default="auto", metavar="NAME", help=told)
    interval = "tokens of an event of a stream; the first token and the end are sent at once (default: 1)"
    group.add_argument("--stream-interval", type=positive, default=1, metavar="N", help=interval)
    shut = "how long running requests may go on after SIGTERM (default: 30)"
    group.add_argument("--shutdown-seconds", type=float, default=30.0, metavar="X", help=shut)
    late = "how long a request may take, queue and stream included; it then ends with status 504 or an error event (default: any time)"
    group.add_argument("--request-timeout", type=float, metavar="X", help=late)
    group.add_argument("--no-page", action="store_true", help="leave out the chat page, which is at / otherwise")
    group.add_argument("--access-log", action="store_true", help="print a line on stderr for each request")
    group.add_argument("--metrics-names", choices=("nanovllm", "vllm"), default="nanovllm", help="the names of the metrics at /metrics")
    group.add_argument("--chunk-dir", type=folder, metavar="DIR", help="a folder for the files of chunks that clients save")
    kept = "save the chunks of clients in --chunk-dir at an orderly end, and load them at the next start"
    group.add_argument("--keep-chunks", action="store_true", help=kept)
    group.add_argument(
        "--max-chunks", type=int, default=256, metavar="N", help="chunks that the clients of one key may have (default: 256)"
    )
    share = "the part of the KV memory that chunks may hold; with keys, each key has an equal part of it (default: 0.5)"
    group.add_argument("--chunk-share", type=float, default=0.5, metavar="X", help=share)
    group.add_argument("--no-restart", action="store_true", help="do not start an engine again that has failed")


def require_server() -> None:
    """Require the packages of the extra `server`.

    Raises:
        InvalidRequestError: Some are not installed.
    """
    lacking = [name for name in NEEDED if find_spec(name) is None]
    if lacking:
        raise InvalidRequestError(f"serve needs {', '.join(lacking)}: pip install 'nanovllm[server]'")


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C.

    Raises:
        InvalidRequestError: An option is invalid, or the extra `server` is not installed.
        CheckpointError: The model cannot be found.
    """
    require_server()
    from nanovllm.entrypoints.server.supervisor import Supervisor

    if options.alone and runs_on_cpu(options.device):
        let_threads_sleep()
    if None not in (options.name, options.model) and options.name != options.model:
        raise InvalidRequestError(f"two models were named, {options.name!r} and --model {options.model!r}: give one of them")
    model = next(name for name in (options.name, options.model, "tiny") if name is not None)
    settings = Settings(
        host=options.host,
        port=options.port,
        model_name=options.model_name or Path(model).name,
        any_model_name=options.any_model_name,
        api_keys=api_keys(options.api_key_file),
        allowed_hosts=tuple(name.lower() for name in options.allowed_host),
        cors_origins=origins(options.cors_origin),
        page=not options.no_page,
        access_log=options.access_log,
        certificate=certificate(options.ssl_certfile, options.ssl_keyfile),
        shutdown_seconds=options.shutdown_seconds,
        request_timeout=options.request_timeout,
        max_waiting=options.max_waiting,
        max_waiting_tokens=options.max_waiting_tokens,
        stream_interval=options.stream_interval,
        metrics_names=options.metrics_names,
        chunk_dir=chunk_folder(options),
        keep_chunks=options.keep_chunks or options.kv_dir is not None,
        max_chunks=options.max_chunks,
        chunk_share=options.chunk_share,
        tool_parser=options.tool_parser,
        reasoning_parser=options.reasoning_parser,
    )
    if options.chunk_dir is not None and not options.chunk_dir.is_dir():
        why = "is not a folder" if options.chunk_dir.exists() else "does not exist: make the folder first"
        raise InvalidRequestError(f"--chunk-dir {options.chunk_dir} {why}")
    if not settings.api_keys and not is_loopback(settings.host):
        raise InvalidRequestError(f"--host {settings.host} can be reached from elsewhere, so a key is needed: --api-key-file or {KEYS}")
    resolve_folder(model, revision=options.revision, download=options.download, with_code=options.trust_remote_code)
    limits = {
        **engine_limits(options),
        **source(options),
        **rounding(options),
        "tensor_parallel_size": options.tensor_parallel_size,
        "download": False,
        "device": options.device,
        "dtype": options.dtype,
        "max_num_seqs": options.max_num_seqs,
        "kv_dir": None if options.kv_dir is None else kv_folder(as_path(options.kv_dir), settings.api_keys),
    }
    folders = [] if options.kv_dir is None else [as_path(options.kv_dir), *([] if settings.chunk_dir is None else [settings.chunk_dir])]
    supervisor = Supervisor(settings, model, limits, workers=options.workers, restart=not options.no_restart)
    made, code = make_kv_dir(*folders), FAILED
    chunks = settings.chunk_dir
    try:
        with nullcontext() if chunks is None else only_server(chunks) as lock:
            try:
                code = supervisor.run(lambda line: print(line, flush=True), lambda told: as_typed(told, options))
            finally:
                if lock is not None and code == FAILED and chunks in made:  # so that the folder is empty again
                    lock.unlink(missing_ok=True)
    finally:
        if code == FAILED:
            for each in reversed(made):
                with suppress(OSError):  # it has files by now
                    each.rmdir()
    return code


def chunk_folder(options: argparse.Namespace) -> Path | None:
    """The folder of chunk files: that of `--chunk-dir`, or one in `--kv-dir`, which `make_kv_dir` makes."""
    return options.chunk_dir if options.kv_dir is None or options.chunk_dir is not None else as_path(options.kv_dir) / "chunks"


def make_kv_dir(*folders: Path) -> list[Path]:
    """Make the folder of `--kv-dir`, and other folders in this order. Those that are made are for their own user only.

    Returns:
        The folders that did not exist.

    Raises:
        InvalidRequestError: A folder cannot be made.
    """
    missing = [folder for folder in folders if not os.path.exists(folder)]
    try:
        for folder in folders:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        why = f"{error.filename} is a file, not a folder" if isinstance(error, FileExistsError) else error.strerror or error
        raise InvalidRequestError(f"--kv-dir {folders[0]} cannot be used: {why}") from error
    return missing


def kv_folder(folder: Path, keys: tuple[bytes, ...]) -> Path:
    """The folder of pages. Namespaces are numbers of keys, so that servers with other keys must not share pages."""
    return folder / f"keys-{hashlib.sha256(b''.join(keys)).hexdigest()[:16]}" if keys else folder


def runs_on_cpu(device: str | None) -> bool:
    """Whether the engine will run on a CPU. Asks neither CUDA nor its driver, which work in no process that is forked afterwards."""
    if device is not None:
        return device == "cpu"
    return torch.version.cuda is None or not any(Path("/dev").glob("nvidia[0-9]*"))


def let_threads_sleep() -> None:
    """Start this program again with a small `GOMP_SPINCOUNT`, unless the environment says how threads wait.

    Threads of a decode step that wait for each other spin long otherwise, on cores that the front end and its clients need too: on two
    cores a reply then takes tens of times as long. Without any spinning (`OMP_WAIT_POLICY=passive`) each wait costs a switch of threads,
    and one stream has a quarter of the tokens a second. The OpenMP library reads the variable when torch is imported, which has happened.
    """
    if any(name in os.environ for name in WAITING) or torch.get_num_threads() == 1:
        return
    os.environ[WAITING[0]] = SPINS
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def api_keys(file: Path | None) -> tuple[bytes, ...]:
    """The digests of the keys in a file and in the environment. Warns of a file that everybody can read.

    Raises:
        InvalidRequestError: The file cannot be read, or has no key.
    """
    keys = [given] if (given := os.environ.get(KEYS, "").strip()) else []
    if file is not None:
        try:
            if file.stat().st_mode & stat.S_IROTH:
                warnings.warn(f"everybody on this machine can read --api-key-file {file}: chmod 600 {file}", stacklevel=2)
            found = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequestError(f"--api-key-file {file}: {error}") from None
        if not found:
            raise InvalidRequestError(f"--api-key-file {file} has no key")
        keys += found
    return tuple(hashlib.sha256(key.encode()).digest() for key in keys)


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to an address.

    Raises:
        InvalidRequestError: There is no such address.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise InvalidRequestError(f"--host {host!r}: {error}") from None
    return all(ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)


def origins(given: list[str]) -> tuple[str, ...]:
    """Origins as browsers write them.

    Raises:
        InvalidRequestError: One is no origin.
    """
    for origin in given:
        parts = urlsplit(origin)
        if origin != "*" and (not parts.scheme or not parts.netloc or origin.lower() != f"{parts.scheme}://{parts.netloc}".lower()):
            raise InvalidRequestError(f"--cors-origin {origin!r} must be * or like https://chat.example:8443, without a path")
    return tuple(origin.lower() for origin in given)


def certificate(chain: str | None, key: str | None) -> tuple[str, str] | None:
    """The files of a TLS server's certificate and key, or None.

    Raises:
        InvalidRequestError: One is missing, or they cannot be used.
    """
    if chain is None and key is None:
        return None
    if chain is None or key is None:
        raise InvalidRequestError("--ssl-certfile and --ssl-keyfile must be given together")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(chain, key)
    except OSError as error:
        raise InvalidRequestError(f"--ssl-certfile {chain} --ssl-keyfile {key} cannot be used: {error}") from None
    return chain, key
