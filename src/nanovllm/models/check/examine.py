"""A model as a whole: `examine` for the report, `choose` for an engine that starts."""

import reprlib
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

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

ROWS = (1, 2, 8, 16, 24)  # of the decode batches of a report: kernels differ for one or two, for more, and beyond 16
START_ROWS = (1, 8, 24)  # of those at the start of an engine
START_TOKENS = 96
CUT_ROWS = 6  # and besides, of those that a tuning file has cuts for, so many
MOST_ROWS = 256  # of a batch: the largest that engines capture unless told otherwise


def examine(model: Model, num_tokens: int = 256, *, page_size: int = 16, cuts: Cuts | None = None) -> CheckReport:
    """Compare the model's fast decode path with its plain layers on `num_tokens` tokens of a text, layer by layer and greedily.

    `cuts`: how the kernels cut their work, None: by their defaults; of the numbers of rows that have some, `cut_rows` are looked at too.
    Raises `InvalidRequestError` for less than one token or more than the model has positions, and `TuningFileError` for cuts by which no
    kernel can be made.
    """
    if model.foreign:
        raise InvalidRequestError(f"{model.name} runs through transformers: it has no layers here to compare")
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
        return reported(model, fast, choice, rows, compared, greedy, cuts)


def choose(model: Model, page_size: int, cuts: Cuts | None = None) -> tuple[FastChoice | None, str]:
    """Which layers of an engine's decode steps may run in their fast form, by a short comparison, and one line of warning or nothing.

    None: the model has no fast form here. Needs memory for one layer and some hundred rows in float64, and on a GPU gives it back to the
    system. Where a kernel cannot be made for this GPU, nothing runs in its fast form. `cuts`: how the kernels cut their work, None: by
    their defaults; of the numbers of rows that have some, `cut_rows` are looked at beside `START_ROWS`. Raises `TuningFileError` for cuts
    by which no kernel can be made.
    """
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
            return nothing, f"{model.name}: the path {fast.name} cannot run here ({reprlib.repr(str(error))}): plain torch does, slower"
        if model.device.type == "cuda":
            torch.cuda.empty_cache()
    choice = chosen(compared, model.dtype)
    return choice, "" if choice.whole else warning(model, fast, choice, compared)


def cut_rows(cuts: Cuts | None, usual: Collection[int]) -> tuple[int, ...]:
    """The numbers of rows, of those that have cuts, that are looked at beside the usual ones: the largest with each set of cuts that no
    usual one has, and of more than `CUT_ROWS` such, as many from the smallest to the largest. Those beyond `MOST_ROWS` are not."""
    steps = {} if cuts is None else {rows: step for rows, step in sorted(cuts.steps.items()) if step != DEFAULT and rows <= MOST_ROWS}
    seen = {step for rows, step in steps.items() if rows in usual}
    kinds = sorted({step: rows for rows, step in steps.items() if step not in seen}.values())
    last = CUT_ROWS - 1
    return tuple(kinds) if len(kinds) <= CUT_ROWS else tuple(kinds[place * (len(kinds) - 1) // last] for place in range(CUT_ROWS))


@contextmanager
def by_cuts(cuts: Cuts | None) -> Iterator[None]:
    """Turns what is raised where no kernel can be made by cuts into `TuningFileError`, which names their file."""
    try:
        yield
    except (*kernel_errors(), CutError) as error:
        if cuts is None:
            raise
        why = " ".join(str(error).split())[:200]
        raise TuningFileError(f"{cuts.source}: no kernel can be made by its cuts: {why}") from error


def kernel_errors() -> tuple[type[Exception], ...]:
    """What Triton raises where it cannot make a kernel for a GPU."""
    if not installed("triton"):
        return ()
    from triton.errors import TritonError

    return (TritonError,)


def warning(model: Model, fast: FastPath, choice: FastChoice, compared: Compared) -> str:
    """One line: what falls back, and the error that is farthest beyond its bound."""
    layers = [index for index, kept in enumerate(choice.layers) if not kept]
    found = [] if choice.head or compared.fast_head is None else [("the head", compared.fast_head, compared.plain_head)]
    for index in layers:
        assert compared.fast is not None
        plain, quick = compared.plain[index], compared.fast[index]
        found += [(f"layer {index}", quick.output, plain.output), (f"layer {index}", quick.kv, plain.kv)]
    place, error, plain_error = max(found, key=lambda each: _excess(each[1], error_bound(each[2], model.dtype)))
    names = [f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"] * bool(layers) + ["the head"] * (not choice.head)
    bound = error_bound(plain_error, model.dtype)
    return (
        f"{model.name}: the path {fast.name} errs by {error:.2g} in {place}, beyond its bound {bound:.2g}: "
        f"{' and '.join(names)} will run in plain torch, slower"
    )


def _excess(error: float, bound: float) -> float:
    """By how much an error is beyond its bound; one that is no number is farthest."""
    return error / bound if error <= bound or error > bound else float("inf")


def _on_device(model: Model) -> AbstractContextManager[object]:
    """Kernels go to the current device: make it the model's."""
    return torch.cuda.device(model.device) if model.device.type == "cuda" else nullcontext()
