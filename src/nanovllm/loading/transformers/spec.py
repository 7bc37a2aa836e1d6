"""`TransformersSpec`: an architecture without a file in `models/`, which runs through transformers' module."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from nanovllm.loading.safetensors_headers import TensorHeader
from nanovllm.models.common.params import Params
from nanovllm.models.spec import ModelSpec
from nanovllm.types import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersSpec(ModelSpec):
    """The spec of the transformers fallback.

    Attributes:
        load: Reads the weights of a folder, as `weights.load_params` does for built-in architectures.
        tensor_faults: Yields a sentence for each fault of the folder's headers, as `weights.header_faults` does.
    """

    load: Callable[..., tuple[Params[Tensor], str]]
    tensor_faults: Callable[[Mapping[str, TensorHeader]], Iterable[str]]
