"""`load_model` reads a checkpoint folder and returns a `Model`."""

import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch

from nanovllm.config import Mesh, ModelConfig, for_length
from nanovllm.errors import CheckpointError, InvalidRequestError
from nanovllm.loading.hub import naming, read_json, require_whole, resolve_folder
from nanovllm.loading.quantisation.activations import require_fp8_products, require_fp8_weights, with_fp8_activations
from nanovllm.loading.quantisation.config import read_quantisation
from nanovllm.loading.quantisation.rounding import quantised_already, require_rounding
from nanovllm.loading.tokenizer_files import load_tokenizer
from nanovllm.loading.transformers.spec import TransformersSpec
from nanovllm.loading.weights import load_params, stored_head
from nanovllm.models.common.hf_config import HF, read_ids
from nanovllm.models.common.sharding import sharded_config
from nanovllm.models.model import Model
from nanovllm.models.registry import REGISTRY, fitted
from nanovllm.models.spec import ModelSpec
from nanovllm.ops.import_ahead import import_ahead
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
    quantization: Literal["fp8", "int8", "int4"] | None = None,
    quantize_head: bool = False,
    fp8_activations: bool = False,
    mesh: Mesh | None = None,
) -> Model:
    """Load a model: the weights, the config and the tokenizer of a checkpoint.

    No network is used unless `download` is True. An architecture without a file in `models/` runs through transformers' own module. This
    fallback is slower, and needs a model whose attention uses transformers' attention interface.

    Args:
        path_or_repo: A Hugging Face checkpoint folder, the name of a repository in the local Hugging Face cache, or `"tiny"`, the packaged
            model.
        device: A torch device, such as `"cpu"` or `"cuda:0"`. None: the current CUDA GPU if torch sees one, else the CPU.
        dtype: float32, bfloat16, float16 or float64, as a torch dtype or by name. None: the checkpoint's dtype on a GPU, float32 on a CPU.
        progress: Whether to show a progress bar on stderr while the weights are read. None: only if stderr is a terminal.
        trust_remote_code: Whether Python code in the checkpoint may be executed. Each file is named on stderr before it runs. The code
            never runs if the architecture is built in, or part of transformers.
        tokenizer: Whether to load a tokenizer. Without it the model takes and returns token ids only, and the folder needs none.
        revision: A branch, a tag or a commit of a repository; the beginning of a commit's hash is enough if it is unambiguous. None:
            `main`, or the only snapshot in the cache if it has no `refs/main`.
        download: Whether to fetch from the Hugging Face Hub the files that the cache lacks.
        max_model_len: The longest request, in tokens, that you will run. Only LongRoPE models depend on it: they rotate long requests by
            other frequencies, and KV of the two kinds cannot be mixed. None: the context length of their first training.
        quantization: `"fp8"`, `"int8"` or `"int4"`: the matrices of attention, MLP and experts are rounded while they are loaded, fp8 and
            int8 with a scale per row, int4 with a scale for each 128 columns. None: weights stay as the checkpoint has them. A checkpoint
            that is quantised already needs no option.
        quantize_head: Whether the output matrix is rounded, too. If it is also the embedding table, the table stays as it is.
        fp8_activations: Whether products of more than 64 tokens with FP8 weights that have a scale per row round the activations to FP8,
            too. That makes prompts and steps of many replies faster and less exact, and a token may then depend on how many others ran
            with it.
        mesh: The ranks that run the model together, from `make_mesh`. Each reads its own part of the weights, and the sizes in
            `Model.config` are those of this part. None: one rank runs the model.

    Returns:
        The model, with its weights on `device` in `dtype`.

    Raises:
        CheckpointError: The checkpoint was not found, could not be downloaded, is incomplete or malformed, or is quantised in a form that
            cannot be loaded. Or its architecture cannot run, or it needs code that `trust_remote_code` does not allow.
        InvalidRequestError: An argument has a wrong type or value, or the device or dtype is unavailable.

    Examples:
        >>> model = nv.load_model("tiny", device="cpu")
        >>> model
        Model('tiny', Qwen3ForCausalLM, 5,772,544 parameters, float32 on cpu)
        >>> model.tokenizer.encode("Once upon a time")
        [858, 974, 258, 632]
    """
    if not isinstance(tokenizer, bool):
        raise InvalidRequestError(f"tokenizer={tokenizer!r} must be True or False")
    if max_model_len is not None and (isinstance(max_model_len, bool) or not isinstance(max_model_len, int) or max_model_len < 1):
        raise InvalidRequestError(f"max_model_len={max_model_len!r} must be an integer of at least 1")
    if not isinstance(trust_remote_code, bool):  # a value that is only truthy does not count as consent
        raise InvalidRequestError(f"trust_remote_code={trust_remote_code!r} must be True or False")
    rounding = require_rounding(quantization, quantize_head)
    target = resolve_device(device)
    folder, name = resolve_folder(path_or_repo, revision=revision, download=download, with_code=trust_remote_code)
    require_whole(folder)
    if target.type == "cuda":
        import_ahead()
    spec, read = read_config(folder, trust_remote_code=trust_remote_code)
    config = for_length(read if isinstance(spec, TransformersSpec) else stored_head(folder, read), max_model_len)
    generation_config, ends = read_generation_config(folder)
    encoder = load_tokenizer(folder, config.vocab_size) if tokenizer else None
    if encoder is not None:
        require_vocabulary(encoder, config, folder)
    chosen = resolve_dtype(dtype, config, target)
    require_fp8_products(fp8_activations, target, chosen)
    config = fitted(config, target, chosen)
    stored = read_quantisation(read_json(folder / "config.json", required=True), folder)
    if stored is not None and rounding is not None:
        raise quantised_already(rounding, stored.method)
    if fp8_activations:
        require_fp8_weights(rounding, stored=stored is not None)
    how: dict[str, Any] = {"device": target, "dtype": chosen, "progress": progress}
    if isinstance(spec, TransformersSpec) and mesh is not None:
        raise InvalidRequestError(f"mesh={mesh!r} needs a built-in architecture, {config.architecture} runs in transformers")
    if isinstance(spec, TransformersSpec):
        if rounding is not None:
            raise InvalidRequestError(
                f"quantization={quantization!r} needs a built-in architecture, {config.architecture} runs in transformers"
            )
        (params, fingerprint), quantised = spec.load(folder, config, **how), ""
    else:
        params, fingerprint, quantised = load_params(folder, config, **how, quantisation=stored, rounding=rounding, mesh=mesh)
    model = Model(
        name=name,
        config=with_ends(config if mesh is None else sharded_config(config, mesh), ends),
        params=params,
        tokenizer=encoder,
        spec=spec,
        generation_config=MappingProxyType(generation_config),
        fingerprint=fingerprint,
        device=target,
        dtype=chosen,
        quantization=quantised,
    )
    return with_fp8_activations(model) if fp8_activations else model


def require_vocabulary(encoder: Tokenizer, config: ModelConfig, folder: Path) -> None:
    """Raise `CheckpointError` if the tokenizer's own vocabulary is larger than the model's.

    An added token may be beyond the model's vocabulary, such as the image token of Gemma 3. Only a text that contains it is refused.
    """
    if encoder.max_base_id >= config.vocab_size:
        raise CheckpointError(
            f"{folder}: the tokenizer has the id {encoder.max_base_id}, but the model's vocab_size is {config.vocab_size}"
        )


def read_config(folder: Path, *, trust_remote_code: bool = False) -> tuple[ModelSpec, ModelConfig]:
    """Read the architecture and the sizes of a checkpoint folder, without its weights. Raises `CheckpointError`."""
    hf = read_json(folder / "config.json", required=True)
    spec = find_spec(hf, folder, trust_remote_code=trust_remote_code)
    with naming(folder):
        return spec, spec.config_from_hf(hf)


def read_generation_config(folder: Path) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Read the `generation_config.json` of a folder, unchanged, and the end tokens that it names.

    These end a reply just as those of `config.json` do. The sampling options are validated when a request uses them, in
    `from_generation_config`. Unknown keys are ignored.

    Returns:
        The values, `{}` without a file, and the ids of the end tokens.

    Raises:
        CheckpointError: The file is not a JSON object, or its end tokens are not ids.
    """
    file = folder / "generation_config.json"
    values = read_json(file)
    try:
        return values, read_ids(values, "eos_token_id")
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {str(error).removeprefix('config.json: ')}") from None


def with_ends(config: ModelConfig, ends: Iterable[int]) -> ModelConfig:
    """A config whose end tokens are its own and those that `read_generation_config` names, each once, in this order."""
    return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *ends))))


def find_spec(hf: HF, folder: Path, *, trust_remote_code: bool = False) -> ModelSpec:
    """Find the architecture that a folder's config names: a built-in one, or one that runs through transformers.

    Raises:
        CheckpointError: The architecture is unknown or cannot run, the weights are quantised, or code is needed and not allowed.
    """
    quantised = read_quantisation(hf, folder)
    names = hf.get("architectures")
    for name in names if isinstance(names, list) else []:
        if name in REGISTRY:
            if hf.get("auto_map"):
                print(f"nanovllm: {folder}: {name} is built in: the checkpoint's own code is not run", file=sys.stderr, flush=True)
            return REGISTRY[name]
    if quantised is not None:
        raise CheckpointError(f"{folder}: quantised weights ({quantised.method}) need a built-in architecture, not one of {names!r}")
    from nanovllm.loading.transformers.load import foreign_spec  # transformers takes seconds to import

    return foreign_spec(folder, hf, ", ".join(REGISTRY), trust_remote_code=trust_remote_code)


def resolve_device(device: torch.device | str | None) -> torch.device:
    """Return an available device. None: the current CUDA GPU if torch sees one, else the CPU. Raises `InvalidRequestError`."""
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise InvalidRequestError(f"device={device!r} is not a torch device such as 'cpu' or 'cuda:0'") from error
    if resolved.type == "cpu":
        return torch.device("cpu")
    if resolved.type != "cuda" or (resolved.index or 0) >= torch.cuda.device_count():
        raise InvalidRequestError(
            f"device={device!r} is unavailable: torch sees {torch.cuda.device_count()} CUDA GPUs; use device='cpu' or an available GPU"
        )
    return torch.device("cuda", torch.cuda.current_device() if resolved.index is None else resolved.index)


def resolve_dtype(dtype: torch.dtype | str | None, config: ModelConfig, device: torch.device) -> torch.dtype:
    """Return the dtype to load in. None: the checkpoint's on a GPU, float32 on a CPU. Raises `InvalidRequestError`."""
    if dtype is None:
        return dtype_of(config.dtype) if device.type == "cuda" else torch.float32
    try:
        resolved = dtype_of(dtype)
    except ValueError as error:
        raise InvalidRequestError(str(error)) from error
    if resolved not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise InvalidRequestError(f"dtype={dtype!r} must be one of float32, bfloat16, float16, float64")
    return resolved
