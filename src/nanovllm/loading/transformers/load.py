"""Loads a model through transformers, compares it with transformers' own attention, and keeps its weights apart from the module."""

import copy
import hashlib
import inspect
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from nanovllm.config import ModelConfig
from nanovllm.errors import CheckpointError
from nanovllm.loading.safetensors_headers import read_headers
from nanovllm.loading.transformers.find import find
from nanovllm.loading.transformers.found import Found, as_checkpoint_error, canonical, quiet, refuse
from nanovllm.loading.transformers.spec import TransformersSpec
from nanovllm.loading.transformers.tensors import tensor_faults
from nanovllm.loading.transformers.trace import embedding, trace
from nanovllm.loading.weights import fingerprint
from nanovllm.models import transformers as fallback
from nanovllm.models.common.batch import Batch
from nanovllm.models.common.hf_config import HF, require_sizes
from nanovllm.models.transformers import ATTENTION, ForeignParams, PagedStep, attach
from nanovllm.state.kv_cache import init_kv
from nanovllm.types import Float, Tensor

PAGE_SIZE = 4  # of the comparison's pages
LENGTHS, FIRST = (11, 7), 6  # tokens of the comparison's two rows; the first row is filled in two steps, beginning with `FIRST` tokens
LEAST_ERROR, SPACINGS = 1e-3, 32  # the larger is allowed: a relative error, and multiples of the dtype's machine epsilon


def foreign_spec(folder: Path, hf: HF, known: str, *, trust_remote_code: bool) -> TransformersSpec:
    """Return the spec by which a folder's model runs through transformers. Arguments are as in `find`.

    Raises `CheckpointError`. So do the spec's `config_from_hf`, before any weights are read, and its `load`.
    """
    require_sizes(hf)
    found = find(folder, hf, known, trust_remote_code=trust_remote_code)
    return TransformersSpec(
        config_from_hf=lambda _: trace(found),
        param_table=fallback.nothing_here,
        layer=fallback.nothing_here,
        head=fallback.nothing_here,
        config_to_hf=fallback.nothing_here,
        load=partial(load_params, found, hf),
        tensor_faults=partial(tensor_faults, found),
    )


def load_params(
    found: Found, hf: HF, folder: Path, config: ModelConfig, *, device: torch.device, dtype: torch.dtype, progress: bool | None = None
) -> tuple[ForeignParams, str]:
    """Load the weights of a checkpoint folder on `device` in `dtype`. The host holds all of them for a moment.

    Returns:
        The weights, and the checkpoint's fingerprint.

    Raises:
        CheckpointError: Tensors are missing, unknown or have a wrong shape. Or paged attention gives other logits than the model's own.
    """
    headers = read_headers(folder)  # first, because it refuses pickles
    for fault in tensor_faults(found, headers):
        raise CheckpointError(f"{folder}: {fault}")
    with as_checkpoint_error(f"{folder}: transformers could not load it"), quiet():
        loaded: Any = found.model.from_pretrained(
            str(folder), config=copy.deepcopy(found.config), dtype=dtype, attn_implementation="eager", local_files_only=True,
            use_safetensors=True, output_loading_info=True,
        )  # fmt: skip
        module, report = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if names := sorted(map(str, report.get(what) or ())):
            raise CheckpointError(f"{folder}: {what.replace('_', ' ')} for {config.architecture}: {', '.join(names[:8])}")
    move: Any = module.eval().requires_grad_(False).to  # typed as Any, because a decorator hides its type
    move(device)
    module.config.return_dict = True
    with as_checkpoint_error(f"{config.architecture} could not be run"), torch.no_grad():
        rows = [_ids(length, config.vocab_size, seed, device) for seed, length in enumerate(LENGTHS)]
        wanted = torch.cat([module(input_ids=row[None], use_cache=False).logits[0] for row in rows])
        params = _apart(module, config)
        _require_agreement(found, wanted, paged_logits(params, config, rows, dtype), dtype)
    digest = hashlib.sha256(fingerprint(config, headers).encode() + canonical(hf))
    for file in found.code:
        digest.update(file.read_bytes())
    return params, digest.hexdigest()


def _apart(module: PreTrainedModel, config: ModelConfig) -> ForeignParams:
    """Separate the weights of a loaded module from its structure, for which the module itself is used."""
    once = {id(weight): weight.detach() for weight in module.parameters()}
    weights = {name: once[id(weight)] for name, weight in module.named_parameters(remove_duplicate=False)}
    buffers = dict(module.named_buffers(remove_duplicate=False))
    embed = once[id(embedding(module))]
    with quiet():
        module.set_attn_implementation(ATTENTION)
    move: Any = module.to
    move("meta")
    attach(module, PagedStep())
    return ForeignParams(
        embed=embed,
        layers=(),
        final_norm=embed.new_empty(0),
        head=None,
        inv_freq=torch.zeros(config.head_dim // 2, device=embed.device),
        weights=weights,
        buffers=buffers,
        module=module,
        keeps="logits_to_keep" in inspect.signature(module.forward).parameters,
    )


def _ids(length: int, vocab_size: int, seed: int, device: torch.device) -> Tensor:
    return ((torch.arange(length, device=device) + 3 * seed) * 7919 + 11) % vocab_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Tokens `start ... stop - 1` of a row, run in one step."""

    row: int
    start: int
    stop: int


def paged_logits(params: ForeignParams, config: ModelConfig, rows: list[Tensor], dtype: torch.dtype) -> Float[Tensor, "T V"]:
    """The logits of all tokens of two rows, computed with paged KV in three steps.

    The first step runs the first row's beginning and all of the second row but its last token. The second step runs the rest of the first
    row but its last token. The third is a decode step with the last token of both.
    """
    long, short = map(len, rows)
    steps = [
        [Piece(row=0, start=0, stop=FIRST), Piece(row=1, start=0, stop=short - 1)],
        [Piece(row=0, start=FIRST, stop=long - 1)],
        [Piece(row=0, start=long - 1, stop=long), Piece(row=1, start=short - 1, stop=short)],
    ]
    width = -(-long // PAGE_SIZE)
    kv = init_kv(config, num_pages=2 * width, page_size=PAGE_SIZE, dtype=dtype, device=rows[0].device)
    logits: list[list[Tensor]] = [[], []]
    for number, pieces in enumerate(steps):
        batch = _batch(rows, pieces, width)
        if number == len(steps) - 1:
            batch = replace(batch, cu_seqlens=None)
        made, kv = fallback.forward(params, kv, batch, config)
        for piece, part in zip(pieces, made.split([piece.stop - piece.start for piece in pieces]), strict=True):
            logits[piece.row].append(part)
    return torch.cat([part for row in logits for part in row])


def _batch(rows: list[Tensor], pieces: list[Piece], width: int) -> Batch:
    def ints(values: list[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=rows[0].device)

    bounds = [0]
    for piece in pieces:
        bounds.append(bounds[-1] + piece.stop - piece.start)
    places = [(piece.row, at) for piece in pieces for at in range(piece.start, piece.stop)]
    return Batch(
        input_ids=torch.cat([rows[piece.row][piece.start : piece.stop] for piece in pieces]).int(),
        positions=ints([at for _, at in places]),
        slots=ints([row * width * PAGE_SIZE + at for row, at in places]),
        page_tables=ints([list(range(piece.row * width, (piece.row + 1) * width)) for piece in pieces]),
        seq_lens=ints([piece.stop for piece in pieces]),
        cu_seqlens=ints(bounds),
    )


def _require_agreement(found: Found, wanted: Tensor, got: Tensor, dtype: torch.dtype) -> None:
    """Raise `CheckpointError` if the logits differ too much.

    In half precision most tokens must agree: a router may pick another expert by rounding.
    """
    wide = torch.promote_types(wanted.dtype, torch.float32)
    errors = (got.to(wide) - wanted.to(wide)).square().mean(-1).sqrt() / wanted.to(wide).square().mean(-1).sqrt().clamp(min=1e-6)
    error = float(errors.median() if dtype.itemsize == 2 else errors.max())
    bound = max(LEAST_ERROR, SPACINGS * torch.finfo(dtype).eps)
    if not error <= bound:
        why = "it uses more of a token than its id, its position, and keys and values"
        refuse(found, f"with paged KV its logits have a relative error of {error:.2g}, above the bound of {bound:.2g}: {why}")
