"""`nanovllm models`: what is supported and how it runs."""

import argparse
import json
import textwrap
from collections.abc import Sequence as Seq
from dataclasses import asdict

from nanovllm.entrypoints.cli.models.listing import Cached, Listed, cached, listed, shared_lines
from nanovllm.entrypoints.display.tables import size
from nanovllm.models.registry import REGISTRY

DESCRIPTION = """\
List the architectures that are built in: the file of each with its lines of code (neither empty nor comment nor docstring), how its decode
steps run on a GPU and on a CPU, and whether chunks can be composed. With --cached, list the models in the local Hugging Face cache.
"""
COLUMNS = ("architecture", "file", "lines", "decode on a GPU", "decode on a CPU", "chunks composed")
FAST = ("fused kernels", "C")
PLAIN = ("compiled layers", "torch")
NOTES = """\
lines: of code, neither empty nor comment nor docstring. What all files share (decoder, layers, params, tables) is {shared} more.
decode on a GPU: in bfloat16 and float16, in CUDA graphs, where FlashInfer serves the model; elsewhere compiled layers with attention in
plain torch. decode on a CPU: in float32 and bfloat16 where there is a C compiler; elsewhere torch. The reasons are those of a config that
names sizes alone.
chunks composed: whether their KV can be moved to other positions, which compose and drop(mode="shift") do.

Any other decoder that transformers has, or with --trust-remote-code a checkpoint brings, runs through transformers' module where its
attention goes through that library's interface: eagerly, with attention in plain torch, slowly, and without compose. Refused are models
whose layers keep another state than keys and values, attention sinks, keys shared between layers, masks that are neither causal nor
windows, and attention that is the model's own; and with any architecture quantised weights, and weights in pickle files alone.
`nanovllm check MODEL --dry-run` tells of one model whether it will run, in how much memory and by which kernels."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `nanovllm models`."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    parser.add_argument("--cached", action="store_true", help="list the models in the local Hugging Face cache, and whether each runs")


def main(options: argparse.Namespace) -> int:
    """Print the list. Returns 0."""
    if options.cached:
        there = cached()
        print(json.dumps({"cached": [asdict(each) for each in there]}, indent=1) if options.json else cached_table(there))
        return 0
    found = [listed(name) for name in REGISTRY]
    if options.json:
        print(json.dumps({"architectures": [asdict(each) for each in found], "shared_lines": shared_lines()}, indent=1))
    else:
        print(markdown(found) if options.markdown else table(found))
    return 0


def table(found: Seq[Listed]) -> str:
    """A row for each architecture, below it the models that people know by it and what its file says of itself, then notes."""
    rows = [COLUMNS, *(_cells(each) for each in found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_aligned(COLUMNS, widths)]
    for each, nxt in zip(found, [*found[1:], None], strict=True):
        lines += [_aligned(_cells(each), widths), f"    {each.known}"]
        if nxt is None or nxt.file != each.file:  # one story a file
            lines += [*textwrap.wrap(each.about, 140, initial_indent="    ", subsequent_indent="    "), ""]
    return "\n".join([*lines, NOTES.format(shared=shared_lines())])


def markdown(found: Seq[Listed]) -> str:
    """The table for a document."""
    head = ("models", *COLUMNS)
    rows = [(each.known, f"`{each.architecture}`", f"`{each.file}`", *_cells(each)[2:]) for each in found]
    marks = tuple("--:" if name == "lines" else "---" for name in head)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, marks, *rows))


def cached_table(found: Seq[Cached]) -> str:
    """A line for each repository."""
    if not found:
        return "There is no model in the Hugging Face cache."
    rows = [("repository", "architecture", "on disk", "runs")]
    for each in found:
        through = "through transformers, if its attention goes through that library's interface: see nanovllm check"
        rows.append((each.name, each.architecture or "-", size(each.size), f"no: {each.against}" if each.against else _runs(each, through)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def _runs(each: Cached, through: str) -> str:
    return "yes" if each.built_in else through


def _cells(each: Listed) -> tuple[str, ...]:
    how = (FAST[i] if not why else f"{PLAIN[i]}: {why}" for i, why in enumerate((each.gpu, each.cpu)))
    return (each.architecture, each.file, str(each.lines), *how, "yes" if each.composes else "no")


def _aligned(row: Seq[str], widths: Seq[int]) -> str:
    return "  ".join(cell.rjust(w) if i == 2 else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))).rstrip()
