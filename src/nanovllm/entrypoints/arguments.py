"""Command-line arguments that several commands share."""

import argparse
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from nanovllm.config import KV_DTYPES
from nanovllm.entrypoints.process import freeze
from nanovllm.errors import InvalidRequestError
from nanovllm.models.model import Model
from nanovllm.ops.linear.quantise import KINDS
from nanovllm.sampling.params import SamplingParams, closest, from_generation_config

TUNING = "a file of `nanovllm tune`, or off for the default tile configurations (default: the file in the cache, else a shipped one)"
DTYPE = "float32, bfloat16 or float16 (default: the model's on a GPU, float32 on a CPU)"
DEVICE = "cpu or cuda (default: a GPU if torch sees one)"
KV_DIR_GIB = 16.0  # the default of --kv-dir-gib
POOL = "enough for requests of full length, but at most 4 GiB on a CPU, or the rest of --memory-fraction on a GPU"

ENGINE = (
    "num_pages", "num_frames", "max_model_len", "max_num_seqs", "max_step_ms", "memory_fraction", "host_kv_gib", "kv_dir", "kv_dir_gib",
    "kv_dtype", "quantize_head", "fp8_activations", "tensor_parallel_size",
)  # fmt: skip
# An argument with its value, which may be several in quotes, or without; not a part of a word, a path or an option.
VALUE = r"='[^']*'(?:(?:, | or )'[^']*')*|=[^\s,;:)]*"
ARGUMENT = re.compile(rf"(?<![\w./'\"-])(?P<name>{'|'.join(ENGINE)}|quantization(?==))(?P<value>{VALUE})?(?![\w/'\"-])")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line that refers to `--help`, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Print the error on stderr and exit with status 2."""
        self.exit(2, f"nanovllm: error: {' '.join(message.split())} (see {self.prog} --help)\n")


class CommandParser(Parser):
    """The parser of one command. It reports unknown arguments itself, so that the error refers to the command's own help."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Parse the arguments, and fail if some are unknown."""
        options, rest = super().parse_known_args(args, namespace)
        if rest:
            known = [option[2:] for option in self._option_string_actions if option.startswith("--")]
            meant = [closest(word[2:].partition("=")[0], known) for word in rest if word.startswith("--")]
            hint = " and ".join(f"--{name}" for name in dict.fromkeys(meant) if name is not None)
            self.error(f"unrecognized arguments: {' '.join(rest)}" + (f": did you mean {hint}?" if hint else ""))
        return options, rest


def as_typed(message: str, options: argparse.Namespace) -> str:
    """A message about arguments of Python functions, with the options of a command as its user types them.

    Examples:
        >>> from nanovllm.entrypoints.arguments import as_typed
        >>> as_typed("num_pages=0 must be at least 1", argparse.Namespace(num_pages=0))
        '--num-pages 0 must be at least 1'
    """

    def typed(found: re.Match[str]) -> str:
        name, value = found["name"], (found["value"] or "").removeprefix("=").replace("'", "")
        if name not in vars(options):
            return found[0]
        option = f"--{name.replace('_', '-')}"
        return option if value in ("", "True") else f"{option} {value}"

    return ARGUMENT.sub(typed, message)


def positive(text: str) -> int:
    """A positive integer argument.

    Raises:
        ArgumentTypeError: The text is something else.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least 1")
    return int(text)


def positives(text: str) -> tuple[int, ...]:
    """Positive integers, separated by commas."""
    return tuple(positive(part) for part in text.split(","))


def add_source(parser: Any) -> None:
    """Add the options for where a model is loaded from, and whether its code may run, to a parser or a group."""
    parser.add_argument("--revision", metavar="R", help="a branch, tag or commit of the repository (default: main)")
    parser.add_argument("--download", action="store_true", help="first download files that the cache lacks from the Hugging Face Hub")
    code = "run Python code of the checkpoint if its architecture is unknown otherwise; each file is named before it runs"
    parser.add_argument("--trust-remote-code", action="store_true", help=code)


def source(options: argparse.Namespace) -> dict[str, Any]:
    """The values of `add_source` as arguments of `load_model`."""
    return {"revision": options.revision, "download": options.download, "trust_remote_code": options.trust_remote_code}


def add_quantization(parser: Any) -> None:
    """Add the options for rounding weights to a parser or a group."""
    kinds = (
        "round the matrices to 8 or 4 bits while they are loaded (int4 is what compressed-tensors and nanovllm quantize call w4a16); "
        "a checkpoint that is quantised already needs no option"
    )
    parser.add_argument("--quantization", type=renamed("w4a16", "int4"), choices=KINDS, help=kinds)
    parser.add_argument("--quantize-head", action="store_true", help="with --quantization: round the output matrix, too")
    rounds = "with FP8 weights that have a scale per row: round activations of steps of many tokens, too: faster, less exact"
    parser.add_argument("--fp8-activations", action="store_true", help=rounds)


def renamed(other: str, name: str) -> Callable[[str], str]:
    """The type of an option whose value `name` is called `other` elsewhere."""

    def value(text: str) -> str:
        if text == other:
            raise argparse.ArgumentTypeError(f"{other} is called {name} here: give {name}")
        return text

    return value


def rounding(options: argparse.Namespace) -> dict[str, Any]:
    """The values of `add_quantization` as arguments of `load_model`. Raises `InvalidRequestError`."""
    if options.quantize_head and options.quantization is None:
        stays = "in a checkpoint that is quantised already, the head stays as it is"
        raise InvalidRequestError(f"--quantize-head needs --quantization {', '.join(KINDS[:-1])} or {KINDS[-1]}; {stays}")
    return {"quantization": options.quantization, "quantize_head": options.quantize_head, "fp8_activations": options.fp8_activations}


def gib_or_auto(text: str) -> float | str:
    """The value of `--host-kv-gib`."""
    with suppress(ValueError):
        return text if text == "auto" else float(text)
    raise argparse.ArgumentTypeError(f"{text!r} must be a number of GiB, or auto")


def folder(text: str) -> Path:
    """The name of a folder. The empty name, such as that of a shell variable without a value, would be the current folder.

    Raises:
        ArgumentTypeError: The text is empty.
    """
    if not text:
        raise argparse.ArgumentTypeError("'' must be the name of a folder")
    return Path(text)


def tuning(text: str) -> Path | bool:
    """The argument `tuning` of `init_state`: False for "off", otherwise a file."""
    return Path(text) if text != "off" else False


def freeze_if_alone(options: argparse.Namespace) -> None:
    """Call `freeze` after the engine's setup, if the process runs only this command."""
    if options.alone:
        freeze()


def engine_limits(options: argparse.Namespace) -> dict[str, Any]:
    """The options of `add_model_options` as arguments of `init_state`. Raises `InvalidRequestError`."""
    names = ("num_pages", "num_frames", "max_model_len", "memory_fraction", "max_step_ms", "tuning", "kv_dtype")
    limits = {name: getattr(options, name) for name in names}
    return {**limits, **kept_kv(options), "compile": False if options.eager else None}


def kept_kv(options: argparse.Namespace) -> dict[str, Any]:
    """The options of `add_model_options` for KV in host memory and on disk, as arguments of `init_state`. Raises `InvalidRequestError`."""
    if options.kv_dir is not None and not options.host_kv_gib:
        raise InvalidRequestError(f"--kv-dir {options.kv_dir} needs host memory, through which KV goes to the disk: set --host-kv-gib too")
    if options.kv_dir is None and options.kv_dir_gib is not None:
        raise InvalidRequestError(f"--kv-dir-gib {options.kv_dir_gib:g} limits the pages in a folder: set --kv-dir too")
    gib = KV_DIR_GIB if options.kv_dir_gib is None else options.kv_dir_gib
    return {"host_kv_gib": options.host_kv_gib, "kv_dir": options.kv_dir, "kv_dir_gib": gib}


def sampling(options: argparse.Namespace, model: Model) -> SamplingParams:
    """The model's sampling options, replaced by those on the command line."""
    names = set(SamplingParams.__dataclass_fields__)
    given = {name: value for name, value in vars(options).items() if name in names and value is not None}
    given.setdefault("max_tokens", options.most_tokens)
    return replace(from_generation_config(model.generation_config), **given)


def add_kv_dtype(parser: Any) -> None:
    """Add the option for the dtype of keys and values to a parser or a group."""
    kept = "keep keys and values as codes of 8 bits, in about half of the memory (default: the dtype of the model)"
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, help=kept)


def add_model_options(parser: argparse.ArgumentParser, num_pages: str = POOL) -> None:
    """Add the options for the model and the engine to a parser."""
    group = parser.add_argument_group("model")
    where = "a folder, a repository in the Hugging Face cache such as Qwen/Qwen3-0.6B, or tiny, the packaged model (default)"
    group.add_argument("--model", default="tiny", metavar="NAME", help=where)
    add_source(group)
    group.add_argument("--device", metavar="D", help=DEVICE)
    group.add_argument("--dtype", metavar="T", help=DTYPE)
    add_quantization(group)
    group.add_argument("--num-pages", type=int, metavar="N", help=f"KV memory in pages of 16 tokens (default: {num_pages})")
    frames = "pages with KV in sliding-window layers, for models that have such layers (default: enough for all running requests)"
    group.add_argument("--num-frames", type=int, metavar="N", help=frames)
    add_kv_dtype(group)
    host = "GiB of host memory for KV whose pages are needed for other requests, which comes back where that is faster; auto: a quarter of "
    host += "the memory that is free (default: 0, none)"
    group.add_argument("--host-kv-gib", type=gib_or_auto, default=0.0, metavar="X", help=host)
    kept = "a folder for KV that outlives the engine: later engines read it where that is faster; needs --host-kv-gib (default: none)"
    group.add_argument("--kv-dir", type=folder, metavar="DIR", help=kept)
    most = f"size limit of the pages in --kv-dir in GiB; a server's named chunks do not count (default: {KV_DIR_GIB:g})"
    group.add_argument("--kv-dir-gib", type=float, metavar="X", help=most)
    group.add_argument("--max-model-len", type=int, metavar="N", help="maximum length of prompt and reply in tokens (default: the model's)")
    group.add_argument("--memory-fraction", type=float, default=0.9, metavar="X", help="fraction of a GPU's memory to use (default: 0.9)")
    bound = "about how long a step may take while replies go on, in milliseconds; longer prompts run in pieces"
    bound = f"{bound} (default: no bound; of serve on a GPU: 25)"
    group.add_argument("--max-step-ms", type=float, metavar="X", help=bound)
    group.add_argument("--tuning", type=tuning, metavar="FILE", help=TUNING)
    group.add_argument(
        "--eager", action="store_true", help="plain torch without CUDA graphs and fast kernels: starts sooner, runs far slower"
    )


def chosen_model_options(options: argparse.Namespace) -> dict[str, Any]:
    """The options of `add_model_options` and `add_ranks` that differ from their defaults."""
    parser = argparse.ArgumentParser(add_help=False)
    add_model_options(parser)
    add_ranks(parser)
    given = vars(options)
    return {name: given[name] for name, default in vars(parser.parse_args([])).items() if given[name] != default}


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """Add the option for several GPUs to a parser."""
    parser.add_argument("--tensor-parallel-size", type=positive, default=1, metavar="N", help="run the model on N GPUs (default: 1)")


def add_sampling_options(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Add the sampling options to a parser. `max_tokens` is what `sampling` takes without the option, which is None then."""
    parser.set_defaults(most_tokens=max_tokens)
    group = parser.add_argument_group("sampling", "Defaults come from the model's generation_config.json.")
    group.add_argument("--max-tokens", type=int, metavar="N", help=f"maximum length of a reply in tokens (default: {max_tokens})")
    group.add_argument("--temperature", type=float, metavar="X", help="0 always takes the most probable token; higher is more varied")
    group.add_argument("--top-k", type=int, metavar="N", help="sample from the N most probable tokens; 0: all")
    group.add_argument(
        "--top-p",
        type=float,
        metavar="X",
        help="nucleus sampling: sample from the top tokens with this total probability",
    )
    group.add_argument("--min-p", type=float, metavar="X", help="drop tokens below this fraction of the top probability")
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same reply")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end the reply before this text; may be repeated")
    group.add_argument("--repetition-penalty", type=float, metavar="X", help="above 1: penalize tokens of prompt and reply (1: off)")
    group.add_argument("--presence-penalty", type=float, metavar="X", help="above 0: penalize tokens that the reply already has")
    group.add_argument("--frequency-penalty", type=float, metavar="X", help="above 0: the same, in proportion to their count")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on after the model's end token")
