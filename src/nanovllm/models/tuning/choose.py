"""The choice of an engine's tile configurations: from the tuning file for its GPU and model, or as the caller says.

The user's own file is preferred to a file of the package.
"""

import os
import warnings
from pathlib import Path

from nanovllm.errors import InvalidRequestError, TuningFileError
from nanovllm.files import is_private
from nanovllm.models.fast import fused
from nanovllm.models.fast.cuts import Cuts
from nanovllm.models.model import Model
from nanovllm.models.tuning.file import default_path, key_of, read_cuts, read_shipped
from nanovllm.models.tuning.launches import Machine, alike
from nanovllm.models.tuning.shipped import shipped_path
from nanovllm.ops.backends import on_hopper, processors, shared_memory


def machine_of(model: Model) -> Machine:
    """The properties of a model's GPU that limit tile configurations."""
    gains = model.params.layers[0].input_norm.dtype
    hopper = model.dtype == gains and on_hopper(model.device, model.dtype)
    return Machine(processors=processors(model.device), memory=shared_memory(model.device), hopper=hopper)


def require_tuning(tuning: object) -> None:
    """Raise `InvalidRequestError` if the option `tuning` has an invalid type."""
    if tuning is not None and not isinstance(tuning, bool | str | os.PathLike):
        raise InvalidRequestError(f"tuning={tuning!r} must be True, False, None or the path of a file of `nanovllm tune`")


def plain(tuning: object) -> object:
    """The option `tuning` for messages: a path becomes a string."""
    return os.fspath(tuning) if isinstance(tuning, os.PathLike) else tuning


def cuts_for(model: Model, tuning: bool | str | os.PathLike[str] | None) -> Cuts | None:
    """The tile configurations of a model's kernels; None for the defaults.

    Args:
        model: The model.
        tuning: False: the defaults. None: the file in the user's cache, or else the file that the package has for this GPU and these
            shapes, if there is one; a warning if it is damaged or if other users can write it. True: the file in the user's cache, which
            must exist. A path: this file.

    Raises:
        TuningFileError: The file was asked for and cannot be used.
        InvalidRequestError: The file was asked for, but the fused kernels do not run this model, or its layers are not quantised alike.
    """
    if tuning is False:
        return None
    if model.config.moe is not None or not fused.serves(model.params, model.config):
        if tuning is None:
            return None
        why = f"applies to the fused kernels of a CUDA GPU, which cannot run this model in {model.dtype} on {model.device}"
        raise InvalidRequestError(f"tuning={plain(tuning)!r} {why}: leave tuning out")
    if not alike(model.params):
        if tuning is None:
            return None
        raise InvalidRequestError(
            f"tuning={plain(tuning)!r} serves layers that are quantised alike, unlike those of {model.name}: leave it out"
        )
    try:
        path = _cached(model) if tuning is None or tuning is True else _given(tuning)
        if path is not None:
            cuts = read_cuts(path, model, machine_of(model))
        elif tuning is None:
            path = shipped_path(model)
            cuts = None if path is None else read_shipped(path, model, machine_of(model))
        else:
            raise TuningFileError(f"no tuning file in the user's cache for {model.name} in {model.dtype} on this GPU; run `nanovllm tune`")
        return None if cuts is None or cuts.default else cuts
    except TuningFileError as error:
        if tuning is not None:
            raise
        warnings.warn(f"{error}; the default tile configurations are used", stacklevel=5)
        return None


def _cached(model: Model) -> Path | None:
    """The file in the user's cache, or None if it does not exist. Raises `TuningFileError` if other users can write it."""
    try:
        path = default_path(key_of(model))
        if not path.exists():
            return None
        if is_private(path.parent) and is_private(path):
            return path
    except OSError:
        return None
    raise TuningFileError(f"{path}: other users can write this file or its folder; remove their permission")


def _given(tuning: str | os.PathLike[str]) -> Path:
    """The path that was given. Raises `TuningFileError` if it cannot be a file name."""
    name = os.fspath(tuning)
    if not isinstance(name, str) or not name or "\0" in name:
        raise TuningFileError(f"tuning={tuning!r} is not a file name")
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise TuningFileError(f"tuning={tuning!r} names an unknown home folder; write ./~ for a file of that name") from error
