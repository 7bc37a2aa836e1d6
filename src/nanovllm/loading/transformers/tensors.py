"""Compares the tensors that a model of transformers needs with the headers of a checkpoint, before any weight is read."""

import re
from collections.abc import Iterable, Iterator, Mapping

from nanovllm.loading.safetensors_headers import TensorHeader
from nanovllm.loading.transformers.found import Found, quiet
from nanovllm.loading.transformers.trace import skeleton

COMPUTED = r"rotary_emb\.inv_freq$"  # stored by old versions of transformers, never read


def tensor_faults(found: Found, headers: Mapping[str, TensorHeader]) -> Iterator[str]:
    """Yield a sentence for each tensor that is missing or unknown, or has a wrong shape.

    It yields nothing if some tensors are missing and others are unknown. Then transformers may rename stored tensors, such as separate
    experts or layers without a prefix. It reports the remaining differences itself once it has read the weights.
    """
    with quiet():
        module = skeleton(found, "eager")
    wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    passed = [*(module._keys_to_ignore_on_load_unexpected or ()), COMPUTED]
    optional = set(module.get_expanded_tied_weights_keys(all_submodels=True)) | (wanted.keys() - dict(module.named_parameters()).keys())
    missing = [name for name in wanted.keys() - headers.keys() - optional if not _any(module._keys_to_ignore_on_load_missing or (), name)]
    unknown = [name for name in headers.keys() - wanted.keys() if not _any(passed, name)]
    if missing and unknown:
        return
    for name in sorted(missing):
        yield f"the checkpoint lacks the tensor {name} {list(wanted[name])}"
    for name in sorted(wanted.keys() & headers.keys()):
        if headers[name].shape != wanted[name]:
            yield f"{name} has shape {list(headers[name].shape)}, the config asks for {list(wanted[name])}"
    for name in sorted(unknown):
        yield f"the checkpoint holds the tensor {name}, which {found.model.__name__} does not have"


def _any(patterns: Iterable[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)
