"""Quantised matrices of which each rank has some columns: which can be shared, and rounding a part as the whole matrix is rounded."""

from torch.nn.functional import pad

from nanovllm.config import Mesh
from nanovllm.errors import CheckpointError, InvalidRequestError
from nanovllm.loading.quantisation.rounding import Rounding, quantisable
from nanovllm.loading.quantisation.stored import StoredMatrices, columns_of_scale, module_of
from nanovllm.models.common.params import ParamInfo, Params
from nanovllm.models.init_params import infos
from nanovllm.ops.distributed.collectives import all_gather
from nanovllm.ops.linear.quantise import GROUP, Kind, quantise
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.ops.linear.quantised_ranges import finer
from nanovllm.types import Tensor


def require_shares(table: Params[ParamInfo], stored: StoredMatrices, rounding: Rounding | None, mesh: Mesh) -> None:
    """Require that the ranks can share the columns of quantised matrices. All ranks refuse the same.

    Args:
        table: The table of a rank.
        stored: The matrices that the checkpoint has quantised.
        rounding: How matrices are quantised while they are loaded; None: not.
        mesh: The ranks.

    Raises:
        CheckpointError: Groups of columns with one scale would become too small.
    """
    if mesh.size == 1:
        return
    rounded = set[int]()
    if rounding is not None and rounding.kind == "int4":
        rounded = {id(info) for info in quantisable(table, head=rounding.head)}
    for info in infos(table):
        if info.part.axis != -1 or len(info.shape) < 2:
            continue
        if id(info) in rounded:
            ((first, last),) = info.part.ranges
            if (last - first) * mesh.size > GROUP:
                _require_groups(info.sources[0], GROUP, first, last, mesh, "quantization='int4': ", " or quantization='int8'")
        for name, (_, columns) in zip(info.sources, info.taken, strict=True):
            if name in stored.formats and 0 < (group := columns_of_scale(stored.formats[name])) < stored.shapes[name][1]:
                _require_groups(name, group, *columns[0], mesh)


def _require_groups(name: str, group: int, first: int, last: int, mesh: Mesh, what: str = "", other: str = "") -> None:
    """Refuse a range of columns, and name the matrix. `what` was asked for, and `other` may help."""
    try:
        finer(group, first, last)
    except InvalidRequestError as error:
        told = f"{module_of(name)} cannot be shared by {mesh.size} ranks: {what}{error}; choose another number of ranks{other}"
        raise CheckpointError(told) from None


def quantised_part(info: ParamInfo, kept: Tensor, kind: Kind, mesh: Mesh | None) -> QuantisedMatrix:
    """Round a rank's part of a matrix to the codes and scales of the whole matrix. If its columns are cut, all ranks call this together.

    Args:
        info: The description of the part, which `require_shares` has accepted.
        kept: The part, `[N, K]` or `[E, N, K]`.
        kind: `"fp8"`, `"int8"` or `"int4"`.
        mesh: The ranks. None: one rank has the whole matrix.
    """
    if mesh is None or mesh.size == 1 or info.part.axis != -1:
        return quantise(kept, kind)
    wide = kept.shape[-1]
    if kind != "int4" or wide * mesh.size <= GROUP:  # one scale serves a row of the whole matrix
        return quantise(kept, kind, wide, largest=all_gather(kept.abs().amax(-1, keepdim=True), mesh).amax(0))
    group = finer(GROUP, mesh.rank * wide, (mesh.rank + 1) * wide)
    if group == GROUP:
        return quantise(kept, kind)
    magnitudes = all_gather(kept.abs().unflatten(-1, (-1, group)).amax(-1), mesh).movedim(0, -2).flatten(-2)  # of the whole matrix
    several = GROUP // group  # magnitudes that share a scale
    missing = -magnitudes.shape[-1] % several
    shared = pad(magnitudes, (0, missing)).unflatten(-1, (-1, several)).amax(-1).repeat_interleave(several, -1)
    own = wide // group
    return quantise(kept, kind, group, largest=shared[..., mesh.rank * own : (mesh.rank + 1) * own])
