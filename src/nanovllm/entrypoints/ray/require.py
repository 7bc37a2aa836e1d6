"""What the rest of this folder needs: the packages of the extra `ray`, and the GPUs of one replica."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from nanovllm.errors import InvalidRequestError


def require_ray(*parts: str) -> None:
    """Require Ray.

    Args:
        *parts: Modules that the parts of Ray in use need, such as `"pyarrow"`.

    Raises:
        InvalidRequestError: Ray or one of these modules is not installed.

    Examples:
        >>> require_ray("pyarrow")
    """
    lacking = [name for name in ("ray", *parts) if find_spec(name) is None]
    if lacking:
        raise InvalidRequestError(f"replicas on Ray need {', '.join(lacking)}: pip install 'nanovllm[ray]'")


def gpus_of(options: Mapping[str, Any], num_gpus: float | None = None) -> float:
    """The GPUs that Ray reserves for one replica.

    Args:
        options: The options of `LLM`.
        num_gpus: What the caller asks for. None: none with `device="cpu"`, else `tensor_parallel_size`, or one without it.

    Returns:
        The number of GPUs.

    Raises:
        InvalidRequestError: The number is negative, or too small for `tensor_parallel_size`.

    Examples:
        >>> gpus_of({"device": "cpu"}), gpus_of({}), gpus_of({"tensor_parallel_size": 2}), gpus_of({}, 0.5)
        (0, 1, 2, 0.5)
    """
    ranks = options.get("tensor_parallel_size") or 1
    on_cpu = str(options.get("device")).partition(":")[0] == "cpu"
    if num_gpus is None:
        return 0 if on_cpu else ranks
    if num_gpus < 0 or (ranks > 1 and not on_cpu and num_gpus < ranks):
        raise InvalidRequestError(f"num_gpus={num_gpus} must be at least {ranks if ranks > 1 else 0}, one for each rank of a replica")
    return num_gpus
