"""`load_model`: a checkpoint folder becomes a `Model`."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from nanovllm.config import ModelConfig, for_length
from nanovllm.errors import CheckpointError, InvalidRequestError
from nanovllm.loading.hub import read_json, require_whole, resolve_folder
from nanovllm.loading.tokenizer_files import load_tokenizer
from nanovllm.loading.transformers.spec import TransformersSpec
from nanovllm.loading.weights import load_params, stored_head
from nanovllm.models.common.hf_config import HF, read_ids
from nanovllm.models.model import Model
from nanovllm.models.registry import REGISTRY, fitted
from nanovllm.models.spec import ModelSpec
from nanovllm.sampling.keywords import explain_unknown_keywords
from nanovllm.tokenizer.tokenizer import Tokenizer
from nanovllm.types import dtype_of


@explain_unknown_keywords
def load_model(
    path_or_repo: str | os.PathLike[str],
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    *,
    progress: bool | None = None,
    trust_remote_code: bool = False,
    tokenizer: bool = True,
    revision: str | None = None,
    download: bool = False,
    max_model_len: int | None = None,
) -> Model:
    """Load a Hugging Face folder, a repository in the local Hugging Face cache, or `"tiny"`, the packaged model.

    Nothing is downloaded without `download=True`. An architecture without a file in `models/` runs through transformers' own module,
    slowly, if its attention goes through that library's interface.

    Args:
        path_or_repo: A folder, a repository such as `"Qwen/Qwen3-0.6B"`, or `"tiny"`.
        device: A torch device or its name. None: a GPU if there is one, else the CPU.
        dtype: float32, bfloat16, float16 or float64, as a torch dtype or its name. None: the checkpoint's dtype on a GPU, float32 on a CPU.
        progress: Whether to draw a progress bar. None: only on a terminal.
        trust_remote_code: Whether Python code of the checkpoint may run. Each file is named on stderr before it runs. Code never runs if
            the architecture is built in or known to transformers.
        tokenizer: Whether to load the tokenizer. With False the folder needs none, and the model takes and gives token ids.
        revision: A branch, tag or commit of the repository; the first digits of a commit are enough. None: `main`, or the only cached
            snapshot.
        download: Whether to fetch from the Hugging Face Hub first the files that the cache lacks.
        max_model_len: The most tokens of a prompt and its reply together. Loading depends on it only for models with LongRoPE, whose
            long contexts are another model with KV of its own. None: the context that they were first trained on.

    Returns:
        The model: config, weights on `device`, tokenizer.

    Raises:
        CheckpointError: The folder lacks something, holds something malformed, or its architecture cannot run. The message names it.
        InvalidRequestError: The device or dtype does not exist here, or an option has a wrong type.

    Example:
        >>> model = load_model("tiny", device="cpu")
        >>> model.config.num_layers
        8
    """
    if not isinstance(tokenizer, bool):
        raise InvalidRequestError(f"tokenizer={tokenizer!r} must be True or False")
    if max_model_len is not None and (isinstance(max_model_len, bool) or not isinstance(max_model_len, int) or max_model_len < 1):
        raise InvalidRequestError(f"max_model_len={max_model_len!r} must be an integer of at least 1, or None")
    if not isinstance(trust_remote_code, bool):  # what is merely truthy is no opt-in
        raise InvalidRequestError(f"trust_remote_code={trust_remote_code!r} must be True or False")
    target = resolve_device(device)
    folder, name = resolve_folder(path_or_repo, revision=revision, download=download, with_code=trust_remote_code)
    require_whole(folder)
    spec, read = read_config(folder, trust_remote_code=trust_remote_code)
    config = for_length(read if isinstance(spec, TransformersSpec) else stored_head(folder, read), max_model_len)
    generation_config, ends = read_generation_config(folder)
    encoder = load_tokenizer(folder, config.vocab_size) if tokenizer else None
    if encoder is not None:
        require_vocabulary(encoder, config, folder)
    chosen = resolve_dtype(dtype, config, target)
    config = fitted(config, target, chosen)
    load = spec.load if isinstance(spec, TransformersSpec) else load_params
    params, fingerprint = load(folder, config, device=target, dtype=chosen, progress=progress)
    return Model(
        name=name,
        config=replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *ends)))),
        params=params,
        tokenizer=encoder,
        spec=spec,
        generation_config=MappingProxyType(generation_config),
        fingerprint=fingerprint,
        device=target,
        dtype=chosen,
    )


def require_vocabulary(encoder: Tokenizer, config: ModelConfig, folder: Path) -> None:
    """Raises `CheckpointError` for a tokenizer whose vocabulary the model does not have. A token that was added to it may lie beyond, as
    that for images of Gemma 3 does: only a text that has it is refused."""
    if encoder.max_base_id >= config.vocab_size:
        raise CheckpointError(f"{folder}: the tokenizer has the id {encoder.max_base_id}, the model's vocab_size is {config.vocab_size}")


def read_config(folder: Path, *, trust_remote_code: bool = False) -> tuple[ModelSpec, ModelConfig]:
    """The architecture and the sizes of a checkpoint folder, without its weights. Raises `CheckpointError`."""
    hf = read_json(folder / "config.json", required=True)
    spec = find_spec(hf, folder, trust_remote_code=trust_remote_code)
    return spec, spec.config_from_hf(hf)


def read_generation_config(folder: Path) -> tuple[dict[str, Any], tuple[int, ...]]:
    """The `generation_config.json` of a folder as it stands, `{}` without one, and the end tokens that it names.

    They end a reply as those of `config.json` do; what is sampled by is read when a request asks (`from_generation_config`), and unknown
    keys are left alone. Raises `CheckpointError` for what is no JSON object, and for end tokens that are no ids.
    """
    file = folder / "generation_config.json"
    values = read_json(file)
    try:
        return values, read_ids(values, "eos_token_id")
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {str(error).removeprefix('config.json: ')}") from None


def find_spec(hf: HF, folder: Path, *, trust_remote_code: bool = False) -> ModelSpec:
    """The architecture that a folder's config names: a built-in one, or one that runs through transformers. Raises `CheckpointError`: an
    unknown one, one that cannot run, quantised weights, or code without the opt-in."""
    if hf.get("quantization_config"):
        raise CheckpointError(f"quantised weights are not supported: quantization_config={hf['quantization_config']!r}")
    names = hf.get("architectures")
    for name in names if isinstance(names, list) else []:
        if name in REGISTRY:
            if hf.get("auto_map"):
                print(f"nanovllm: {folder}: {name} is built in: the checkpoint's own code is not run", file=sys.stderr, flush=True)
            return REGISTRY[name]
    from nanovllm.loading.transformers.load import foreign_spec  # transformers takes seconds to import

    return foreign_spec(folder, hf, ", ".join(REGISTRY), trust_remote_code=trust_remote_code)


def resolve_device(device: torch.device | str | None) -> torch.device:
    """A device that exists here; None: CUDA where there is one. Raises `InvalidRequestError`."""
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise InvalidRequestError(f"device={device!r} is not a torch device such as 'cpu' or 'cuda:0'") from error
    if found.type == "cpu":
        return torch.device("cpu")
    if found.type != "cuda" or (found.index or 0) >= torch.cuda.device_count():
        raise InvalidRequestError(f"device={device!r} is not here; there are cpu and {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)


def resolve_dtype(dtype: torch.dtype | str | None, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype to load in; None: the checkpoint's on CUDA, float32 on a CPU. Raises `InvalidRequestError`."""
    if dtype is None:
        return dtype_of(config.dtype) if device.type == "cuda" else torch.float32
    try:
        found = dtype_of(dtype)
    except ValueError as error:
        raise InvalidRequestError(str(error)) from error
    if found not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise InvalidRequestError(f"dtype={dtype!r} is not one of float32, bfloat16, float16, float64")
    return found
