"""`StoredMatrices`: which of a checkpoint's matrices are quantised, and what is wrong with their tensors."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from nanovllm.errors import CheckpointError
from nanovllm.loading.quantisation.awq import Awq
from nanovllm.loading.quantisation.config import Quantisation
from nanovllm.loading.quantisation.formats import MatrixFormat, Part
from nanovllm.loading.quantisation.gptq import Gptq
from nanovllm.loading.quantisation.packed_words import PackedWords
from nanovllm.loading.quantisation.scaled_codes import ScaledCodes
from nanovllm.loading.safetensors_headers import TensorHeader
from nanovllm.models.common.params import ParamInfo, Params
from nanovllm.models.init_params import infos
from nanovllm.types import FLOATS

WEIGHT = ".weight"
QUANTISED_DTYPES = ("I8", "F8_E4M3", "F8_E5M2")
QUANTISED_NAMES = (".weight_packed", ".weight_scale", ".weight_scale_inv", ".qweight", ".qzeros")
GROUPS = (128, 64, 32, 256, 16, 512, 1024, 8, 0)  # columns of a group, the most frequent first; 0: a scale per row


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
                    yield self._wrong_shape(name, suffix, header)
                elif header.dtype not in part.dtypes:
                    yield f"{whole} has dtype {header.dtype}, expected one of {', '.join(part.dtypes)}"

    def _wrong_shape(self, name: str, suffix: str, header: TensorHeader) -> str:
        """What is wrong with the shape of a tensor: most often `group_size`, if another one fits."""
        stored, shape = self.formats[name], self.shapes[name]
        found = f"{module_of(name)}.{suffix} in {header.file.name} has shape {list(header.shape)}"
        wanted = list(stored.parts(*shape)[suffix].shapes[0])
        mine = _group(stored)
        for size in GROUPS if mine is not None and self.quantisation is not None else ():
            if header.shape in _with_group(stored, size).parts(*shape)[suffix].shapes:
                source = "config.json" if self.quantisation is None else self.quantisation.source
                alone = size == 0 or size >= shape[1]
                fits = f"group_size=-1, or at least {shape[1]}" if alone else f"group_size={size}"
                return f"{found}, which fits {fits}, but {source} has group_size={mine or -1}, which asks for {wanted}"
        return f"{found}, {stored.summary} asks for {wanted}"

    def beside(self, name: str, header: TensorHeader) -> bool:
        """Whether a quantised checkpoint may hold this tensor, on which the weights do not depend."""
        if self.quantisation is None:
            return False
        module, _, suffix = name.rpartition(".")
        if suffix == "bias":  # of zeros, which `load_params` checks
            return self.quantisation.biases and f"{module}{WEIGHT}" in self.formats and len(header.shape) == 1
        return name.endswith(self.quantisation.extra)


UNQUANTISED = StoredMatrices()


def lost_config(headers: Mapping[str, TensorHeader]) -> str | None:
    """What to say about a checkpoint whose config does not say that it is quantised, if its tensors look quantised; else None."""
    for name, header in sorted(headers.items()):
        if (header.dtype in QUANTISED_DTYPES and len(header.shape) > 1) or name.endswith(QUANTISED_NAMES):
            found = f"{name} ({header.dtype}) in {header.file.name} looks quantised"
            return f"{found}, but config.json has no quantization_config: copy or download config.json again"
    return None


def columns_of_scale(stored: MatrixFormat) -> int:
    """Columns that a scale serves, 0 for all of a row."""
    return stored.columns if isinstance(stored, ScaledCodes) else _group(stored) or 0


def _group(stored: MatrixFormat) -> int | None:
    """The `group_size`, 0 for a whole row. None: the scales of the format do not depend on it."""
    if isinstance(stored, ScaledCodes):
        return stored.columns if stored.rows == 1 else None
    return stored.group if isinstance(stored, PackedWords | Gptq | Awq) else None


def _with_group(stored: MatrixFormat, size: int) -> MatrixFormat:
    """The format with another number of columns for each scale; see `_group`."""
    if isinstance(stored, ScaledCodes):
        return replace(stored, columns=size)
    return replace(stored, group=size) if isinstance(stored, PackedWords | Gptq | Awq) else stored


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
