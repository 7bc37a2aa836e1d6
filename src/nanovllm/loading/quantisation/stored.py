"""`StoredMatrices`: which of a checkpoint's matrices are quantised, and what is wrong with their tensors."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from nanovllm.errors import CheckpointError
from nanovllm.loading.quantisation.config import Quantisation
from nanovllm.loading.quantisation.formats import MatrixFormat, Part
from nanovllm.loading.safetensors_headers import TensorHeader
from nanovllm.models.common.params import ParamInfo, Params
from nanovllm.models.init_params import infos
from nanovllm.types import FLOATS

WEIGHT = ".weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMatrices:
    """The quantised matrices of a checkpoint, by their names in the table, such as `model.layers.0.mlp.up_proj.weight`.

    Attributes:
        formats: The format of each quantised matrix.
        shapes: The shape of each, `(N, K)`.
        quantisation: What the config says; None for a checkpoint that is not quantised.
    """

    formats: Mapping[str, MatrixFormat] = field(default_factory=lambda: MappingProxyType({}))
    shapes: Mapping[str, tuple[int, int]] = field(default_factory=lambda: MappingProxyType({}))
    quantisation: Quantisation | None = None

    @property
    def names(self) -> set[str]:
        """The names of all tensors that the matrices may consist of."""
        return {f"{module_of(name)}.{suffix}" for name in self.formats for suffix in self.parts(name)}

    @property
    def summary(self) -> str:
        """The method and the formats in a few words; empty without quantised matrices."""
        kinds = dict.fromkeys(each.summary for each in self.formats.values())
        return f"{', '.join(kinds)} ({self.quantisation.method})" if self.quantisation is not None and kinds else ""

    def parts(self, name: str) -> Mapping[str, Part]:
        """The tensors of a matrix by suffix; none if its format cannot store its shape, which `faults` tells."""
        try:
            return self.formats[name].parts(*self.shapes[name])
        except CheckpointError:
            return {}

    def read(self, name: str, headers: Mapping[str, TensorHeader]) -> Mapping[str, str]:
        """The names of the tensors that make up a matrix, by suffix."""
        names = {suffix: f"{module_of(name)}.{suffix}" for suffix, part in self.parts(name).items() if part.read}
        return {suffix: whole for suffix, whole in names.items() if whole in headers}

    def faults(self, headers: Mapping[str, TensorHeader]) -> Iterator[str]:
        """Yield a sentence for each tensor of a quantised matrix that is missing or has a wrong shape or dtype."""
        for name, stored in self.formats.items():
            try:
                parts = stored.parts(*self.shapes[name])
            except CheckpointError as error:
                yield f"{module_of(name)} {list(self.shapes[name])} cannot be {stored.summary}: {error}"
                continue
            for suffix, part in parts.items():
                whole = f"{module_of(name)}.{suffix}"
                header = headers.get(whole)
                if header is None:
                    if part.needed:
                        yield f"the checkpoint lacks the tensor {whole} {list(part.shapes[0])}, which {stored.summary} needs"
                elif header.shape not in part.shapes:
                    yield f"{whole} has shape {list(header.shape)}, {stored.summary} asks for {list(part.shapes[0])}"
                elif header.dtype not in part.dtypes:
                    yield f"{whole} has dtype {header.dtype}, expected one of {', '.join(part.dtypes)}"

    def beside(self, name: str, header: TensorHeader) -> bool:
        """Whether a quantised checkpoint may hold this tensor, on which the weights do not depend."""
        if self.quantisation is None:
            return False
        module, _, suffix = name.rpartition(".")
        if suffix == "bias":  # of zeros, which `load_params` checks
            return self.quantisation.biases and f"{module}{WEIGHT}" in self.formats and len(header.shape) == 1
        return name.endswith(self.quantisation.extra)


UNQUANTISED = StoredMatrices()


def module_of(name: str) -> str:
    """The name of the module of a weight."""
    return name.removesuffix(WEIGHT)


def stored_matrices(headers: Mapping[str, TensorHeader], table: Params[ParamInfo], quantisation: Quantisation | None) -> StoredMatrices:
    """Find the quantised matrices of a checkpoint: those of the table that have no floating-point weight and that the config covers.

    What is stored decides, because configs name modules that are not quantised in many ways.
    """
    if quantisation is None:
        return UNQUANTISED
    formats: dict[str, MatrixFormat] = {}
    shapes: dict[str, tuple[int, int]] = {}
    for info in infos(table):
        for name, shape in zip(info.sources, info.source_shapes, strict=True):
            header = headers.get(name)
            plain = info.kind != "matrix" or info.transposed or len(shape) != 2 or (header is not None and header.dtype in FLOATS)
            made = None if plain else quantisation.format_of(module_of(name))
            if made is not None:
                formats[name], shapes[name] = made, (shape[0], shape[1])
    return StoredMatrices(formats=MappingProxyType(formats), shapes=MappingProxyType(shapes), quantisation=quantisation)
