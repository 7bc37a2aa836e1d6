"""`nanovllm quantize`: write a quantised copy of a checkpoint."""

import argparse
from pathlib import Path

from nanovllm.entrypoints.arguments import DEVICE, add_source, renamed
from nanovllm.entrypoints.display.tables import size
from nanovllm.entrypoints.display.terminal import note
from nanovllm.entrypoints.process import ended_in_order
from nanovllm.loading.hub import require_whole, resolve_folder
from nanovllm.loading.load_model import resolve_device
from nanovllm.loading.quantised_copy import SCHEMES, write_quantised
from nanovllm.ops.linear.quantise import GROUP

DESCRIPTION = """\
Write a copy of a checkpoint whose matrices of attention, MLP and experts are rounded to 8 or 4 bits, in the form of compressed-tensors.
nanovllm, transformers and vLLM read it. Weights are rounded to the nearest code, without calibration; embeddings, norms, routers and the
head stay as they are."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `nanovllm quantize`."""
    parser.add_argument("model", metavar="MODEL", help="a folder, a repository in the Hugging Face cache, or tiny, the packaged model")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to make")
    forms = "fp8: e4m3 with a scale per row; int8: a scale per row; w4a16: 4 bits with a scale for each 128 columns, elsewhere called int4"
    parser.add_argument("--format", required=True, type=renamed("int4", "w4a16"), choices=[*SCHEMES], help=forms)
    parser.add_argument("--device", metavar="D", help=f"where matrices are rounded: {DEVICE}")
    add_source(parser)


def run(options: argparse.Namespace) -> int:
    """Run `nanovllm quantize`. Returns the exit code.

    Raises:
        InvalidRequestError: The folder exists or cannot be written, or the format fits no matrix.
        CheckpointError: The model cannot be found, or cannot be quantised.
    """
    how = {"revision": options.revision, "download": options.download, "with_code": options.trust_remote_code}
    folder, name = resolve_folder(options.model, **how)
    require_whole(folder)
    device = resolve_device(options.device)
    with ended_in_order():  # an unfinished folder is removed
        made = write_quantised(folder, options.out, options.format, device=device, trust_remote_code=options.trust_remote_code)
    sizes = f"{size(made.before)} became {size(made.after)}"
    others = tuple(each for each in made.kept if each not in made.uneven)
    why = f"; as before, because their widths are no multiples of {GROUP}: {_some(made.uneven)}" if made.uneven else ""
    note(f"{name} in {options.out}: {made.matrices} matrices in {options.format}, {sizes}{why}; as before: {_some(others)}")
    return 0


def _some(names: tuple[str, ...]) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
