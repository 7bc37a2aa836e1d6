"""Arguments that the commands share."""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from nanovllm.errors import InvalidRequestError


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like all of ours, and name the help in the place of the whole usage."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        self.exit(2, f"nanovllm: error: {' '.join(message.split())} (see {self.prog} --help)\n")


class CommandParser(Parser):
    """The parser of one command: what it does not know is its own error, so that its own help is named."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As `argparse` has it, with nothing left over."""
        options, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return options, rest


def positive(text: str) -> int:
    """An argument that counts something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least 1")
    return int(text)


def positives(text: str) -> tuple[int, ...]:
    """Several of them, comma-separated."""
    return tuple(positive(part) for part in text.split(","))


def add_source(parser: Any) -> None:
    """The options, of a parser or a group, that say which files a model is loaded from, and whether code among them runs."""
    parser.add_argument("--revision", metavar="R", help="a branch, tag or commit of the repository (default: main)")
    parser.add_argument(
        "--download", action="store_true", help="first fetch from the Hugging Face Hub what the cache lacks of the repository"
    )
    code = "execute code that the checkpoint brings, where nothing else knows its architecture; each file is named before it runs"
    parser.add_argument("--trust-remote-code", action="store_true", help=code)


def shortened(lines: Iterable[str], most: int = 8) -> list[str]:
    """The first of many lines, and how many more there are."""
    found = list(lines)
    return [*found[:most], *[f"and {len(found) - most} more"] * (len(found) > most)]


def source(options: argparse.Namespace) -> dict[str, Any]:
    """What `add_source` was given, for `load_model`."""
    return {"revision": options.revision, "download": options.download, "trust_remote_code": options.trust_remote_code}


def tuning(text: str) -> Path | bool:
    """An argument for `tuning` of `init_state`: off, or a file."""
    return Path(text) if text != "off" else False


TUNING = "a file of `nanovllm tune`, or off: the kernels' default cuts (default: the file in the cache, where there is one)"


def require_folder(path: Path | None) -> None:
    """Before minutes of measuring: the file can be written, in a folder that is made if it is not there. Raises `InvalidRequestError`."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequestError(f"{path}: {error.strerror}") from None
    if path.is_dir():
        raise InvalidRequestError(f"{path} is a folder, not a file to write")
