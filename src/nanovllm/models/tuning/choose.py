"""The cuts that an engine uses: those of the file for its GPU and model, where there is one, or what its caller says."""

import os
import warnings
from pathlib import Path

from nanovllm.errors import InvalidRequestError, TuningFileError
from nanovllm.files import is_private
from nanovllm.models.fast import fused
from nanovllm.models.fast.cuts import Cuts
from nanovllm.models.model import Model
from nanovllm.models.tuning.file import default_path, key_of, read_cuts
from nanovllm.models.tuning.launches import Machine
from nanovllm.ops.backends import processors, shared_memory


def machine_of(model: Model) -> Machine:
    """The GPU that a model is on."""
    return Machine(processors=processors(model.device), memory=shared_memory(model.device))


def require_tuning(tuning: object) -> None:
    """Raise `InvalidRequestError` for what the option cannot be."""
    if tuning is not None and not isinstance(tuning, bool | str | os.PathLike):
        raise InvalidRequestError(f"tuning={tuning!r} must be True, False, None or the path of a file of `nanovllm tune`")


def plain(tuning: object) -> object:
    """The option as messages say it: a path by its name."""
    return os.fspath(tuning) if isinstance(tuning, os.PathLike) else tuning


def cuts_for(model: Model, tuning: bool | str | os.PathLike[str] | None) -> Cuts | None:
    """The cuts by which a model's kernels run; None: their defaults, and where a file has no others.

    `tuning`: False is the defaults; None the file in the cache, where it is there, and a warning where it is damaged or somebody else can
    write it; True that file; a path the file there. Raises `TuningFileError` for a file that was asked for and cannot be used,
    `InvalidRequestError` where one was asked for and the kernels do not run.
    """
    if tuning is False:
        return None
    if model.config.moe is not None or not fused.serves(model.params, model.config):
        if tuning is None:
            return None
        why = f"is for the kernels of a CUDA GPU, which do not run this model in {model.dtype} here"
        raise InvalidRequestError(f"tuning={plain(tuning)!r} {why}")
    try:
        path = _cached(model) if tuning is None or tuning is True else _given(tuning)
        if path is None and tuning is None:
            return None
        if path is None:
            raise TuningFileError(f"no file in the user's cache for {model.name} in {model.dtype} on this GPU: `nanovllm tune` writes it")
        cuts = read_cuts(path, model, machine_of(model))
        return None if cuts.default else cuts
    except TuningFileError as error:
        if tuning is not None:
            raise
        warnings.warn(f"{error}; the default cuts are used", stacklevel=5)
        return None


def _cached(model: Model) -> Path | None:
    """The file in the user's cache; None where there is none, or no cache. Raises `TuningFileError` for one that others can write."""
    try:
        path = default_path(key_of(model))
        if not path.exists():
            return None
        if is_private(path.parent) and is_private(path):
            return path
    except OSError:
        return None
    raise TuningFileError(f"{path}: it, or its folder, can be written by other users")


def _given(tuning: str | os.PathLike[str]) -> Path:
    """The path that was given. Raises `TuningFileError` for what no file is called."""
    name = os.fspath(tuning)
    if not isinstance(name, str) or not name or "\0" in name:
        raise TuningFileError(f"tuning={tuning!r} is not the name of a file")
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise TuningFileError(f"tuning={tuning!r} begins in a home folder that is not known; write ./~ for a file of that name") from error
