"""Finds a checkpoint: a folder, the packaged model, or a snapshot of a repository in the Hugging Face cache. Downloads only on request.

In the cache the file `models--org--name/refs/<branch or tag>` holds a commit. The folder `models--org--name/snapshots/<commit>` holds links
to the files.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nanovllm.errors import CheckpointError, InvalidRequestError
from nanovllm.loading.safetensors_headers import INDEX, PICKLED, SINGLE, weight_files

TINY = Path(__file__).parents[1] / "assets" / "tiny"
COMMIT = re.compile(r"[0-9a-f]{4,40}")  # a commit's hash, or its beginning
WANTED = ("*.json", "*.jinja", "*.safetensors", "*.model", "merges.txt", "vocab.txt")  # the files of a repository to download
UNWANTED = ("*/*.json", "*/*.safetensors", "*/*.model", "consolidated*.safetensors")  # mostly the same weights in other formats


def resolve_folder(
    path_or_repo: str | os.PathLike[str], *, revision: str | None = None, download: bool = False, with_code: bool = False
) -> tuple[Path, str]:
    """Find the folder of a checkpoint, and the model's name.

    Args:
        path_or_repo: A folder, a repository's name, or `"tiny"`.
        revision: A branch, a tag, or a commit's hash or its unambiguous beginning; for repositories only. None: `main`, or the only
            snapshot if the cache has no `refs/main`.
        download: Whether to fetch missing files first; see `download_snapshot`. A folder is taken as it is.
        with_code: Whether to download Python files too.

    Raises:
        CheckpointError: Neither a folder nor a cached repository has the name, or the download failed.
        InvalidRequestError: An argument has a wrong type or value.
    """
    if not isinstance(path_or_repo, str | os.PathLike):
        raise InvalidRequestError(f"a model must be named by a path or repository, not {path_or_repo!r}")
    if not (revision is None or (isinstance(revision, str) and revision)):
        raise InvalidRequestError(f"revision={revision!r} must be a branch, a tag or a commit of a repository")
    if not isinstance(download, bool):
        raise InvalidRequestError(f"download={download!r} must be True or False")
    given = os.fspath(path_or_repo)
    folder = Path(os.path.expanduser(given))  # os.path, which raises nothing for an impossible file name
    is_folder = bool(given) and os.path.isdir(folder)
    if revision is not None and (is_folder or given == "tiny"):
        raise InvalidRequestError(f"revision={revision!r}: {given!r} is a folder, and only repositories have revisions")
    if is_folder:
        return folder, folder.resolve().name
    if given == "tiny":
        if not (TINY / "config.json").is_file():
            raise CheckpointError(f"the packaged tiny model is missing: {TINY} has no config.json; install nanovllm again")
        return TINY, "tiny"
    if not given or given.count("/") > 1 or given.startswith((".", "/", "~")):
        if os.path.isfile(folder):
            raise CheckpointError(f"{given!r} is a file: give its folder")
        raise CheckpointError(f"no such folder: {given!r}; give a folder, a repository such as org/name, or tiny")
    if download:
        return download_snapshot(given, revision, with_code=with_code), given
    repo = _cached(given)
    if os.path.isdir(repo):
        return find_snapshot(repo, revision), given
    if os.path.isfile(folder):
        raise CheckpointError(f"{given!r} is a file: give its folder")
    if "/" in given:
        hint = "download=True, or --download, fetches it from the Hub"
    elif get_close_matches(given.lower(), ("tiny",), cutoff=0.8):
        hint = "did you mean 'tiny', the packaged model?"
    else:
        hint = "names on the Hub usually have the form org/name"
    raise CheckpointError(f"{given!r} is neither a folder nor a repository in the Hugging Face cache {repo.parent}; {hint}")


def is_local(name: str) -> bool:
    """Whether a name is that of a file, a folder or a repository in the Hugging Face cache."""
    return os.path.exists(os.path.expanduser(name)) or os.path.isdir(_cached(name))


def _cached(repo: str) -> Path:
    """The folder of a repository in the Hugging Face cache, if it is there."""
    return hub_cache() / f"models--{repo.replace('/', '--')}"


def find_snapshot(repo: Path, revision: str | None) -> Path:
    """Return the snapshot of a revision in a repository's cache folder. Raises `CheckpointError`, which lists the cached revisions."""
    snapshots = sorted(path.name for path in (repo / "snapshots").glob("*") if path.is_dir())
    name = revision or "main"
    reference = repo / "refs" / name
    if not Path(name).is_absolute() and ".." not in Path(name).parts and os.path.isfile(reference):
        commit = reference.read_text(encoding="utf-8", errors="replace").strip()
        if commit not in snapshots:
            raise CheckpointError(
                f"{repo}: refs/{name} names the snapshot {commit}, which is missing: the repository was not downloaded whole"
            )
        return repo / "snapshots" / commit
    if revision is None and len(snapshots) == 1:  # a cache that was copied by hand
        return repo / "snapshots" / snapshots[0]
    matching = [snapshot for snapshot in snapshots if COMMIT.fullmatch(name) and snapshot.startswith(name)]
    if len(matching) == 1:
        return repo / "snapshots" / matching[0]
    if matching:
        raise CheckpointError(f"{repo}: revision {name!r} is the beginning of several commits: {', '.join(matching)}")
    refs = sorted(path.relative_to(repo / "refs").as_posix() for path in (repo / "refs").rglob("*") if path.is_file())
    cached = ", ".join([*refs, *snapshots]) or "nothing"
    if revision is None:
        raise CheckpointError(f"{repo}: no refs/main; name a revision that the cache has: {cached}")
    raise CheckpointError(f"{repo}: no revision {name!r}; the cache has {cached}")


def download_snapshot(repo: str, revision: str | None, *, with_code: bool = False) -> Path:
    """Download a repository's newest files at a revision into the Hugging Face cache with huggingface_hub, and return the snapshot.

    It fetches configs, tokenizers, templates and safetensors, and with `with_code` Python files too. Cached files are not fetched again. If
    the Hub cannot be reached, or `HF_HUB_OFFLINE` is set, a complete snapshot in the cache is enough.

    Raises:
        CheckpointError: The repository or revision does not exist or is gated, or there is no network.
    """
    import huggingface_hub  # slow to import, and seldom needed

    try:
        return Path(
            huggingface_hub.snapshot_download(
                repo,
                revision=revision,
                cache_dir=hub_cache(),
                allow_patterns=[*WANTED, *(("*.py",) if with_code else ())],
                ignore_patterns=list(UNWANTED),
            )
        )
    except Exception as error:  # from the library, its HTTP client, or the system
        at = repo if revision is None else f"{repo} at {revision}"
        if (fault := _unreachable(error)) is not None:
            host = urlsplit(huggingface_hub.constants.ENDPOINT).netloc
            raise CheckpointError(
                f"the connection to {host} for {at} failed: {fault}; check the network, or use a model of the cache"
            ) from error
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{at} could not be downloaded: {type(error).__name__}: {reason}") from error


def _unreachable(error: BaseException) -> str | None:
    """The reason of a failed connection, if an error of the HTTP client's transport caused this error; otherwise None."""
    import httpx

    causes = [error]
    while (cause := causes[-1].__cause__ or (None if causes[-1].__suppress_context__ else causes[-1].__context__)) is not None:
        causes.append(cause)
    if not any(isinstance(cause, httpx.TransportError) for cause in causes):
        return None
    reasons = (" ".join(str(getattr(cause, "strerror", None) or cause).split()) for cause in reversed(causes))
    return next((reason[:100] for reason in reasons if reason), type(causes[-1]).__name__)


def require_whole(folder: Path) -> None:
    """Raise `CheckpointError` naming the first missing file of a cached snapshot: its config, the target of a link, or weights."""
    if folder.parent.name != "snapshots":
        return
    links = sorted(path.name for path in folder.iterdir() if path.is_symlink() and not path.exists())
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    missing += [name for name in links if any(fnmatch(name, kind) for kind in WANTED)]
    if not missing:
        has_weights = any(path.name == INDEX or path.suffix in (".safetensors", *PICKLED) for path in folder.iterdir())
        missing = [name for name in (weight_files(folder) if has_weights else [SINGLE]) if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder}: lacks {missing[0]}; the repository was not downloaded whole (download=True, or --download, fetches the rest)"
        )


def hub_cache() -> Path:
    """The Hugging Face cache folder, by the environment variables that huggingface_hub reads."""
    direct = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if direct:
        return Path(direct).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or f"{base}/huggingface").expanduser() / "hub"


def cached_repositories() -> list[tuple[str, Path]]:
    """The models of the cache by name, each with its folder. Only names are read."""
    folders = sorted(path for path in hub_cache().glob("models--*") if path.is_dir())
    return [(path.name.removeprefix("models--").replace("--", "/", 1), path) for path in folders]


@contextmanager
def naming(folder: Path, file: str = "config.json") -> Iterator[None]:
    """Let errors inside of the block that begin with `config.json: ` begin with the path of the file that was read instead."""
    try:
        yield
    except CheckpointError as error:
        if not str(error).startswith("config.json: "):
            raise
        raise CheckpointError(f"{folder / file}: {str(error).removeprefix('config.json: ')}") from error.__cause__


def read_json(file: Path, *, required: bool = False) -> dict[str, Any]:
    """Read a JSON object of a checkpoint folder; `{}` if the file is absent and not required. Raises `CheckpointError`."""
    if not file.is_file():
        if required:
            raise CheckpointError(f"{file.parent}: no {file.name}")
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: a {type(value).__name__}, expected an object")
    return value
