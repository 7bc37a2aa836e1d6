"""Arguments that the commands share."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from nanovllm.entrypoints.process import freeze
from nanovllm.errors import InvalidRequestError
from nanovllm.models.model import Model
from nanovllm.sampling.params import SamplingParams, from_generation_config

TUNING = "a file of `nanovllm tune`, or off: the kernels' default cuts (default: the file in the cache, where there is one)"
POOL = "what requests of full length need, at most 4 GiB on a CPU and what --memory-fraction leaves on a GPU"


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


def source(options: argparse.Namespace) -> dict[str, Any]:
    """What `add_source` was given, for `load_model`."""
    return {"revision": options.revision, "download": options.download, "trust_remote_code": options.trust_remote_code}


def tuning(text: str) -> Path | bool:
    """An argument for `tuning` of `init_state`: off, or a file."""
    return Path(text) if text != "off" else False


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


def freeze_if_alone(options: argparse.Namespace) -> None:
    """The engine stands: what is alive now stays, where this process is ours alone."""
    if options.alone:
        freeze()


def engine_limits(options: argparse.Namespace) -> dict[str, Any]:
    limits = {name: getattr(options, name) for name in ("num_pages", "num_frames", "max_model_len", "memory_fraction", "tuning")}
    return {**limits, "compile": False if options.eager else None}


def sampling(options: argparse.Namespace, model: Model) -> SamplingParams:
    """The model's own options, with those that were given on the command line in their place."""
    names = set(SamplingParams.__dataclass_fields__)
    given = {name: value for name, value in vars(options).items() if name in names and value is not None}
    return replace(from_generation_config(model.generation_config), **given)


def add_model_options(parser: argparse.ArgumentParser, num_pages: str = POOL) -> None:
    group = parser.add_argument_group("model")
    where = "a folder, a repository in the Hugging Face cache such as Qwen/Qwen3-0.6B, or tiny, the packaged model (default)"
    group.add_argument("--model", default="tiny", metavar="NAME", help=where)
    add_source(group)
    group.add_argument("--device", metavar="D", help="cpu or cuda (default: a GPU where there is one)")
    group.add_argument("--dtype", metavar="T", help="float32, bfloat16 or float16 (default: the checkpoint's on a GPU, float32 on a CPU)")
    group.add_argument("--num-pages", type=int, metavar="N", help=f"KV memory in pages of 16 tokens (default: {num_pages})")
    frames = "pages that have KV in layers with a sliding window too (default: enough for all that runs); for models that have some"
    group.add_argument("--num-frames", type=int, metavar="N", help=frames)
    group.add_argument("--max-model-len", type=int, metavar="N", help="the most tokens of prompt and reply together (default: the model's)")
    group.add_argument("--memory-fraction", type=float, default=0.9, metavar="X", help="the share of a GPU's memory to use (default 0.9)")
    group.add_argument("--tuning", type=tuning, metavar="FILE", help=TUNING)
    group.add_argument("--eager", action="store_true", help="plain function calls, on a GPU too: starts sooner, runs far slower")


def add_sampling_options(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    group = parser.add_argument_group("sampling", "What is not given is as the model's generation_config.json says.")
    group.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N", help=f"the longest reply (default {max_tokens})")
    group.add_argument("--temperature", type=float, metavar="X", help="0 takes the likeliest token each time; higher is more varied")
    group.add_argument("--top-k", type=int, metavar="N", help="draw from the N likeliest tokens; 0: all")
    group.add_argument("--top-p", type=float, metavar="X", help="draw from the likeliest tokens that make up this probability")
    group.add_argument("--min-p", type=float, metavar="X", help="leave out tokens below this share of the likeliest one's probability")
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same reply")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end the reply before this text; may be given several times")
    group.add_argument("--repetition-penalty", type=float, metavar="X", help="above 1: against tokens that stood before (1: none)")
    group.add_argument("--presence-penalty", type=float, metavar="X", help="above 0: against tokens that the reply has already")
    group.add_argument("--frequency-penalty", type=float, metavar="X", help="above 0: the same, the more the oftener they occurred")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="do not end where the model would")
