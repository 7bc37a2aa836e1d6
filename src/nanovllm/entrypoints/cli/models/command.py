"""`nanovllm models`: the supported architectures, as tables and as JSON."""

import argparse
import json
import textwrap
from collections.abc import Sequence as Seq
from dataclasses import asdict

from nanovllm.entrypoints.cli.models.listing import Cached, Listed, cached, listed, shared_lines
from nanovllm.entrypoints.display.tables import aligned, size
from nanovllm.models.registry import REGISTRY

DESCRIPTION = """\
List the built-in architectures. For each: its file, the lines of code in it, how decode steps run on a GPU and on a CPU, and whether
chunks can be composed. With --cached, list the models in the local Hugging Face cache instead.
"""
COLUMNS = ("architecture", "file", "lines", "decode on a GPU", "decode on a CPU", "chunks composed")
FAST = ("fused kernels", "C")
PLAIN = ("compiled layers", "torch")
NOTES = """\
lines: lines of code, without empty lines, comments and docstrings. All files share {shared} more lines (decoder, layers, params, tables).
decode on a GPU: applies to bfloat16 and float16, in CUDA graphs, for models that FlashInfer supports. Other models run compiled layers
with attention in plain PyTorch.
decode on a CPU: applies to float32 and bfloat16 if a C compiler is installed. Otherwise PyTorch runs it.
The reasons shown assume a config that sets sizes only.
chunks composed: whether the KV of a chunk can be moved to other positions. compose and drop(mode="shift") need it.

Any other decoder of transformers runs through the transformers fallback, if its attention uses transformers' attention interface. So does
a decoder that a checkpoint brings, with --trust-remote-code. The fallback is slow: it runs eagerly, with attention in plain PyTorch, and
without compose. The fallback refuses:
  - layers that keep another state than keys and values;
  - attention sinks;
  - keys that several layers share;
  - masks that are neither causal nor sliding windows;
  - attention outside of transformers' attention interface.
Quantised weights (fp8, compressed-tensors, gptq, awq) need a built-in architecture. Weights that exist only as pickle files are refused.
`nanovllm check MODEL --dry-run` says whether one model will run, in how much memory and with which kernels."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `nanovllm models`."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    parser.add_argument("--cached", action="store_true", help="list the models in the local Hugging Face cache, and whether each runs")


def main(options: argparse.Namespace) -> int:
    """Print the list. Returns 0."""
    if options.cached:
        repositories = cached()
        print(json.dumps({"cached": [asdict(each) for each in repositories]}, indent=1) if options.json else cached_table(repositories))
        return 0
    architectures = [listed(name) for name in REGISTRY]
    if options.json:
        print(json.dumps({"architectures": [asdict(each) for each in architectures], "shared_lines": shared_lines()}, indent=1))
    else:
        print(markdown(architectures) if options.markdown else table(architectures))
    return 0


def table(found: Seq[Listed]) -> str:
    """A row for each architecture, then its well-known models and the description of its file; notes at the end."""
    head, *rows = aligned(COLUMNS, [_cells(each) for each in found], left=(0, 1, 3, 4, 5))
    lines = [head]
    for row, each, nxt in zip(rows, found, [*found[1:], None], strict=True):
        lines += [row, f"    {each.known}"]
        if nxt is None or nxt.file != each.file:  # the description once per file
            lines += [*textwrap.wrap(each.about, 140, initial_indent="    ", subsequent_indent="    "), ""]
    return "\n".join([*lines, NOTES.format(shared=shared_lines())])


def markdown(found: Seq[Listed]) -> str:
    """The same rows as a Markdown table."""
    head = ("models", *COLUMNS)
    rows = [(each.known, f"`{each.architecture}`", f"`{each.file}`", *_cells(each)[2:]) for each in found]
    marks = tuple("--:" if name == "lines" else "---" for name in head)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, marks, *rows))


def cached_table(found: Seq[Cached]) -> str:
    """A line for each repository of the cache."""
    if not found:
        return "No model was found in the Hugging Face cache."
    rows = []
    for each in found:
        through = "through the transformers fallback, if its attention uses transformers' attention interface: see nanovllm check"
        rows.append((each.name, each.architecture or "-", size(each.size), f"no: {each.against}" if each.against else _runs(each, through)))
    return "\n".join(aligned(("repository", "architecture", "on disk", "runs"), rows, left=range(4)))


def _runs(each: Cached, through: str) -> str:
    return "yes" if each.built_in else through


def _cells(each: Listed) -> tuple[str, ...]:
    how = (FAST[i] if not why else f"{PLAIN[i]}: {why}" for i, why in enumerate((each.gpu, each.cpu)))
    return (each.architecture, each.file, str(each.lines), *how, "yes" if each.composes else "no")
