"""`Model`: a config, its weights and its tokenizer as one frozen value, and `load_model`, which makes it from a folder."""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from .config import ModelConfig
from .errors import CheckpointError, InvalidRequestError
from .hf_config import HF, read_ids
from .keywords import explain_unknown_keywords
from .models import REGISTRY, ModelSpec, Params
from .models.foreign import ForeignParams
from .models.params import brief_count
from .tokenizer import Tokenizer, load_tokenizer
from .types import Tensor, dtype_of, register_value
from .weights import load_params

TINY = Path(__file__).parent / "assets" / "tiny"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """A loaded model. `dtype` is that of the weights on `device`; `config.dtype` is what the checkpoint was saved in.

    `generation_config` is the checkpoint's file as it stands. `fingerprint` tells whose KV a chunk holds (see `weights.fingerprint`).
    As a pytree its leaves are the weights; the rest is structure.
    """

    name: str
    config: ModelConfig
    params: Params[Tensor]
    tokenizer: Tokenizer | None
    spec: ModelSpec
    generation_config: Mapping[str, Any]
    fingerprint: str
    device: torch.device
    dtype: torch.dtype

    @property
    def foreign(self) -> bool:
        """Whether transformers' module runs the model, for there is no file in `models/` for its architecture."""
        return isinstance(self.params, ForeignParams)

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"Model({self.name!r}, {self.config.architecture}, {brief_count(self.params)}, {dtype} on {self.device})"


register_value(Model, static=tuple(name for name in Model.__dataclass_fields__ if name != "params"))


@explain_unknown_keywords
def load_model(
    path_or_repo: str | os.PathLike[str],
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    *,
    progress: bool | None = None,
    trust_remote_code: bool = False,
    tokenizer: bool = True,
) -> Model:
    """Load a Hugging Face folder, a repository out of the local Hugging Face cache, or `"tiny"`, the packaged model; no network is used.

    Defaults: CUDA where there is one; the checkpoint's dtype on CUDA, float32 on a CPU. `progress` as in `weights.load_params`.
    `tokenizer` False loads none, and the folder needs none: the model takes and gives token ids.
    Raises `CheckpointError` naming what is wrong with the folder, `InvalidRequestError` for a device or dtype that does not exist here.
    An architecture without a file in `models/` runs through transformers' own module, slower, where its attention goes through that
    library's interface. A checkpoint that brings code is refused without `trust_remote_code`; with it, stderr names each file before it
    is executed, and none is where the architecture is built in, or in transformers.
    """
    if not isinstance(tokenizer, bool):
        raise InvalidRequestError(f"tokenizer={tokenizer!r} must be True or False")
    if not isinstance(trust_remote_code, bool):  # what is merely truthy is no opt-in
        raise InvalidRequestError(f"trust_remote_code={trust_remote_code!r} must be True or False")
    target = resolve_device(device)
    folder, name = resolve_folder(path_or_repo)
    spec, config = read_config(folder, trust_remote_code=trust_remote_code)
    generation_config = read_json(folder / "generation_config.json", required=False)
    encoder = load_tokenizer(folder) if tokenizer else None
    if encoder is not None and encoder.max_token_id >= config.vocab_size:
        raise CheckpointError(f"{folder}: the tokenizer has the id {encoder.max_token_id}, the model's vocab_size is {config.vocab_size}")
    chosen = resolve_dtype(dtype, config, target)
    load = load_params if spec.load is None else spec.load
    params, fingerprint = load(folder, config, device=target, dtype=chosen, progress=progress)
    eos = dict.fromkeys((*config.eos_token_ids, *read_ids(generation_config, "eos_token_id")))
    return Model(
        name=name,
        config=replace(config, eos_token_ids=tuple(eos)),
        params=params,
        tokenizer=encoder,
        spec=spec,
        generation_config=MappingProxyType(generation_config),
        fingerprint=fingerprint,
        device=target,
        dtype=chosen,
    )


def read_config(folder: Path, *, trust_remote_code: bool = False) -> tuple[ModelSpec, ModelConfig]:
    """The architecture and the sizes of a checkpoint folder, without its weights. Raises `CheckpointError`."""
    hf = read_json(folder / "config.json", required=True)
    spec = find_spec(hf, folder, trust_remote_code=trust_remote_code)
    return spec, spec.config_from_hf(hf)


def find_spec(hf: HF, folder: Path, *, trust_remote_code: bool = False) -> ModelSpec:
    """The architecture that a folder's config names: a built-in one, or one that runs through transformers. Raises `CheckpointError`: an
    unknown one, one that cannot run, quantised weights, or code without the opt-in."""
    if hf.get("auto_map") and not trust_remote_code:
        raise CheckpointError(f"the checkpoint brings its own code (auto_map={hf['auto_map']!r}): refused without trust_remote_code=True")
    if hf.get("quantization_config"):
        raise CheckpointError(f"quantised weights are not supported: quantization_config={hf['quantization_config']!r}")
    names = hf.get("architectures")
    for name in names if isinstance(names, list) else []:
        if name in REGISTRY:
            if hf.get("auto_map"):
                print(f"nanovllm: {folder}: {name} is built in: the checkpoint's own code is not run", file=sys.stderr, flush=True)
            return REGISTRY[name]
    from .foreign.load import foreign_spec  # transformers takes seconds to import

    return foreign_spec(folder, hf, ", ".join(REGISTRY))


def resolve_folder(path_or_repo: str | os.PathLike[str]) -> tuple[Path, str]:
    """The folder of a checkpoint and the model's name. Raises `CheckpointError` if neither a folder nor a cached repository has the name.

    The cache is `HF_HUB_CACHE`, `HUGGINGFACE_HUB_CACHE`, `HF_HOME/hub` or `~/.cache/huggingface/hub`; a repository's folder there is
    `models--org--name/snapshots/<the commit in refs/main>`.
    """
    if not isinstance(path_or_repo, str | os.PathLike):
        raise InvalidRequestError(f"a model must be named by a path or repository, not {path_or_repo!r}")
    given = os.fspath(path_or_repo)
    folder = Path(given).expanduser()
    if given == "tiny" and not folder.is_dir():
        if not (TINY / "config.json").is_file():
            raise CheckpointError(f"the packaged tiny model is missing: {TINY} has no config.json")
        return TINY, "tiny"
    if given and folder.is_dir():
        return folder, folder.resolve().name
    cache = hub_cache()
    repo = cache / f"models--{given.replace('/', '--')}"
    reference = repo / "refs" / "main"
    if given.count("/") > 1 or given.startswith((".", "/", "~")) or not given or not repo.is_dir():
        raise CheckpointError(f"{given!r} is neither a folder nor a repository in the Hugging Face cache {cache} (nothing is downloaded)")
    if not reference.is_file():
        raise CheckpointError(f"{repo}: no refs/main; the repository was not downloaded whole")
    snapshot = repo / "snapshots" / reference.read_text(encoding="utf-8").strip()
    if not snapshot.is_dir():
        raise CheckpointError(f"{repo}: refs/main names the snapshot {snapshot.name}, which is missing")
    return snapshot, given


def hub_cache() -> Path:
    """The Hugging Face cache folder, by the environment variables that huggingface_hub reads."""
    direct = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if direct:
        return Path(direct).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or f"{base}/huggingface").expanduser() / "hub"


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


def read_json(file: Path, *, required: bool) -> dict[str, Any]:
    """A JSON object out of a checkpoint folder; `{}` where the file is absent and not required. Raises `CheckpointError`."""
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
