"""Finds the class of transformers, or of a checkpoint's own code, that a `config.json` names, and refuses classes that cannot run."""

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nanovllm.errors import CheckpointError
from nanovllm.loading.transformers.found import Found, as_checkpoint_error, note, quiet, refuse
from nanovllm.loading.transformers.remote_code import by_code
from nanovllm.models.common.hf_config import FULL, HF, SLIDING

ATTENDING = {FULL, SLIDING}  # the accepted names in `layer_types`
STATES = {"linear_attention", "mamba", "conv", "recurrent", "hybrid", "hybrid_sliding"}
LENGTHWISE = ("dynamic", "longrope")  # with these rotary embeddings a key depends on the length of its request


def find(folder: Path, hf: HF, known: str, *, trust_remote_code: bool) -> Found:
    """Find the class that runs the checkpoint of a folder.

    Code of the checkpoint runs only if transformers does not have the architecture, and only with `trust_remote_code`. Each file is named
    on stderr first.

    Args:
        folder: The checkpoint folder.
        hf: Its config.
        known: The names of the built-in architectures, for messages.
        trust_remote_code: Whether code of the checkpoint may run.

    Raises:
        CheckpointError: The architecture is unknown or cannot run, or its code is not allowed.
    """
    names, auto_map = hf.get("architectures"), hf.get("auto_map") or {}
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"unknown architecture {names!r}: architectures in config.json must name one; known are {known}")
    code = not _native(hf, names) and bool(auto_map)
    if code and not trust_remote_code:
        raise CheckpointError(f"the checkpoint brings its own code (auto_map={auto_map!r}): to run it, pass trust_remote_code=True")
    if auto_map and not code:
        note(f"{folder}: {names[0]} is in transformers {transformers.__version__}: the checkpoint's own code is not run")
    with as_checkpoint_error(f"{folder}: transformers {transformers.__version__} cannot read its config"), quiet():
        found = by_code(folder, auto_map) if code else _by_transformers(folder, hf, names, known)
    require_ordinary(found)
    return found


def _native(hf: HF, names: list[str]) -> bool:
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(hf.get("model_type")))
    return causal is not None and bool(set(names) & set(causal if isinstance(causal, list | tuple) else (causal,)))


def _by_transformers(folder: Path, hf: HF, names: list[str], known: str) -> Found:
    kind, version = hf.get("model_type"), transformers.__version__
    if kind not in CONFIG_MAPPING:
        raise CheckpointError(f"unknown architecture {names!r}; known are {known}, and transformers {version} has no model_type {kind!r}")
    config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    model: type[PreTrainedModel] | None = cast(Any, MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None))
    if model is None or not _native(hf, names):
        has = "none" if model is None else model.__name__
        raise CheckpointError(
            f"unknown architecture {names!r}; known are {known}, and it is not a causal language model of transformers {version}, "
            f"which for model_type {kind!r} has {has}"
        )
    text = type(config).sub_configs.get("text_config")
    return Found(model=model, config=config.get_text_config() if text is not None and text is model.config_class else config, code=())


def require_ordinary(found: Found) -> None:
    """Raise `CheckpointError` if the class or the config asks for something that paged keys and values cannot serve."""
    model, config = found.model, found.decoder
    parameters = inspect.signature(model.forward).parameters
    types = set(getattr(config, "layer_types", None) or ())
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    lengthwise = sorted({str(kind) for kind in _rope_types(config)} & set(LENGTHWISE))
    if getattr(config, "is_encoder_decoder", False):
        why = "it is an encoder-decoder model"
    elif getattr(model, "_is_stateful", False) or types & STATES:
        why = f"its layers keep a state other than keys and values (layer_types: {', '.join(sorted(map(str, types))) or 'unknown'})"
    elif types - ATTENDING:
        why = f"its layers attend neither to all tokens nor to a window (layer_types: {', '.join(sorted(map(str, types - ATTENDING)))})"
    elif not model._can_set_attn_implementation():
        why = "its attention does not go through transformers' attention interface"
    elif "position_ids" not in parameters:
        why = "its forward takes no position_ids"
    elif shared:
        why = f"{shared} of its layers share the keys and values of others"
    elif lengthwise:
        why = f"its rotary embedding ({', '.join(lengthwise)}) depends on the length of the request"
    else:
        return
    refuse(found, why)


def _rope_types(config: PreTrainedConfig) -> Iterator[Any]:
    for rope in (getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)):
        if isinstance(rope, Mapping):
            for each in (rope, *(value for value in rope.values() if isinstance(value, Mapping))):
                yield each.get("rope_type", each.get("type"))
