"""The comparison of a whole model: `examine` for the report of `nanovllm check`, `choose` for the start of an engine."""

import reprlib
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from nanovllm.errors import InvalidRequestError, TuningFileError
from nanovllm.models.check.agree import agreement
from nanovllm.models.check.compare import Compared, compare, error_bound
from nanovllm.models.check.report import CheckReport, chosen, reported
from nanovllm.models.check.sample_text import sample_tokens
from nanovllm.models.fast.choice import FastChoice
from nanovllm.models.fast.cuts import DEFAULT, Cuts
from nanovllm.models.fast.path import FastPath, fast_path
from nanovllm.models.model import Model
from nanovllm.ops.backends import installed
from nanovllm.ops.cuts import CutError
from nanovllm.ops.linear.quantised import QuantisedMatrix

ROWS = (1, 2, 8, 16, 24)  # batch sizes of a report: kernels differ for 1 or 2 rows, for up to 16, and for more
START_ROWS = (1, 8, 24)  # batch sizes at the start of an engine
START_TOKENS = 96  # tokens of the text at the start of an engine
CUT_ROWS = 6  # most additional batch sizes, from a tuning file
MOST_ROWS = 256  # largest additional batch size: the largest that engines capture by default


def examine(model: Model, num_tokens: int = 256, *, page_size: int = 16, cuts: Cuts | None = None) -> CheckReport:
    """Compare the model's fast decode path with its plain layers on a text, layer by layer and by greedy decoding.

    Args:
        model: The model.
        num_tokens: Tokens of the text.
        page_size: Tokens per page.
        cuts: The tile configurations of the kernels; None for the defaults. Batch sizes from `cut_rows` are compared too.

    Raises:
        InvalidRequestError: The model runs through transformers, or `num_tokens` is below 1 or above the model's positions.
        TuningFileError: A kernel cannot be built with these tile configurations.
    """
    return examined(model, num_tokens, page_size=page_size, cuts=cuts)[0]


def examined(model: Model, num_tokens: int, *, page_size: int = 16, cuts: Cuts | None = None) -> tuple[CheckReport, Compared]:
    """As `examine`, with the comparison of the layers that is behind the report."""
    model = _without_rounding(model)
    if model.foreign:
        raise InvalidRequestError(f"{model.name} runs through the transformers fallback, which has no fast path to compare")
    if not 1 <= num_tokens <= model.config.max_position_embeddings:
        raise InvalidRequestError(f"num_tokens={num_tokens} must be 1 to {model.config.max_position_embeddings}, the model's positions")
    with _on_device(model), by_cuts(cuts):
        fast = fast_path(model.params, model.config, cuts)
        usual = tuple(count for count in ROWS if count <= num_tokens)
        rows = (1,) if fast is None else tuple(sorted({*usual, *cut_rows(cuts, usual)}))
        token_ids = sample_tokens(model, num_tokens)
        compared = compare(model, fast, token_ids, rows, page_size)
        choice = None if fast is None else chosen(compared, model.dtype)
        greedy = None if fast is None or choice is None else agreement(model, fast, choice, token_ids, compared.final, page_size)
        return reported(model, fast, choice, rows, compared, greedy, cuts), compared


def choose(model: Model, page_size: int, cuts: Cuts | None = None) -> tuple[FastChoice | None, str]:
    """Choose the layers that run in their fast form in an engine's decode steps, by a short comparison.

    It needs memory for one layer and some hundred rows in float64. On a GPU, the memory is returned to the system.

    Args:
        model: The model.
        page_size: Tokens per page.
        cuts: The tile configurations of the kernels; None for the defaults. Batch sizes from `cut_rows` are compared in addition to
            `START_ROWS`.

    Returns:
        The choice, and one line of warning or an empty string. The choice is None if the model has no fast form on this device. It has
        no fast layers if a kernel cannot be built for this GPU.

    Raises:
        TuningFileError: A kernel cannot be built with these tile configurations.
    """
    model = _without_rounding(model)
    with _on_device(model), by_cuts(cuts):
        fast = fast_path(model.params, model.config, cuts)
        if fast is None:
            return None, ""
        token_ids = sample_tokens(model, min(START_TOKENS, model.config.max_position_embeddings))
        usual = {min(count, len(token_ids)) for count in START_ROWS}
        try:
            compared = compare(model, fast, token_ids, sorted({*usual, *cut_rows(cuts, usual)}), page_size)
        except kernel_errors() as error:
            if cuts is not None:
                raise
            nothing = FastChoice(layers=(False,) * model.config.num_layers, head=False)
            why = reprlib.repr(str(error))
            return nothing, f"{model.name}: the path {fast.name} cannot run here ({why}): plain torch runs the model, slower"
        if model.device.type == "cuda":
            torch.cuda.empty_cache()
    choice = chosen(compared, model.dtype)
    return choice, "" if choice.whole else warning(model, fast, choice, compared)


def _without_rounding(model: Model) -> Model:
    """The model without `fp8_activations`: kernels are compared, and what that option rounds is larger than their errors."""

    def rounds(leaf: Any) -> bool:
        return isinstance(leaf, QuantisedMatrix) and leaf.fp8_activations

    if not any(map(rounds, pytree.tree_leaves(model.params, is_leaf=rounds))):
        return model
    exact = pytree.tree_map(lambda leaf: replace(leaf, fp8_activations=False) if rounds(leaf) else leaf, model.params, is_leaf=rounds)
    return replace(model, params=exact)


def cut_rows(cuts: Cuts | None, usual: Collection[int]) -> tuple[int, ...]:
    """The batch sizes of a tuning file to compare in addition to the `usual` ones, at most `MOST_ROWS` rows.

    They are the largest batch size of each set of tile configurations that no usual batch size has. Of more than `CUT_ROWS` of them,
    `CUT_ROWS` are taken, evenly spread from the smallest to the largest.
    """
    steps = {} if cuts is None else {rows: step for rows, step in sorted(cuts.steps.items()) if step != DEFAULT and rows <= MOST_ROWS}
    seen = {step for rows, step in steps.items() if rows in usual}
    kinds = sorted({step: rows for rows, step in steps.items() if step not in seen}.values())
    last = CUT_ROWS - 1
    return tuple(kinds) if len(kinds) <= CUT_ROWS else tuple(kinds[place * (len(kinds) - 1) // last] for place in range(CUT_ROWS))


@contextmanager
def by_cuts(cuts: Cuts | None) -> Iterator[None]:
    """Inside this block, turn errors of kernels that cannot be built with `cuts` into `TuningFileError` with the name of the file."""
    try:
        yield
    except (*kernel_errors(), CutError) as error:
        if cuts is None:
            raise
        why = " ".join(str(error).split())[:200]
        raise TuningFileError(f"{cuts.source}: a kernel cannot be built with its tile configurations: {why}") from error


def kernel_errors() -> tuple[type[Exception], ...]:
    """The errors that Triton raises if it cannot build a kernel for a GPU."""
    if not installed("triton"):
        return ()
    from triton.errors import TritonError

    return (TritonError,)


def warning(model: Model, fast: FastPath, choice: FastChoice, compared: Compared) -> str:
    """One line of warning: the layers that fall back, and the error that exceeds its bound most."""
    layers = [index for index, kept in enumerate(choice.layers) if not kept]
    errors = [] if choice.head or compared.fast_head is None else [("the head", compared.fast_head, compared.plain_head)]
    for index in layers:
        assert compared.fast is not None
        plain, quick = compared.plain[index], compared.fast[index]
        errors += [(f"layer {index}", quick.output, plain.output), (f"layer {index}", quick.kv, plain.kv)]
    place, error, plain_error = max(errors, key=lambda each: _excess(each[1], error_bound(each[2], model.dtype)))
    names = [f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"] * bool(layers) + ["the head"] * (not choice.head)
    bound = error_bound(plain_error, model.dtype)
    return (
        f"{model.name}: the path {fast.name} has a relative error of {error:.2g} in {place}, above its bound {bound:.2g}: "
        f"{' and '.join(names)} will run in plain torch, slower"
    )


def _excess(error: float, bound: float) -> float:
    """The error divided by its bound; infinite for NaN."""
    return error / bound if error <= bound or error > bound else float("inf")


def _on_device(model: Model) -> AbstractContextManager[object]:
    """A block with the model's device as the current device, because kernels are launched on the current device."""
    return torch.cuda.device(model.device) if model.device.type == "cuda" else nullcontext()
