"""`LogitsProcessor` by itself: which arguments a function gets, rows that it does not serve, what it may return and carry."""

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import nanovllm as nv
from nanovllm.sampling.process_logits import Processing, as_processor, first_carried, process, processing_of, require_alike, tokens_of

LOGITS = torch.arange(12.0).view(3, 4)
ROWS = [np.array([5, 6], np.int32), np.array([7], np.int32), np.array([1, 2, 3], np.int32)]
TOKENS = tokens_of(ROWS, 4, torch.device("cpu"))


def of(function: Any, init: Any = None, uses: list[bool] | None = None) -> Processing:
    processor = nv.LogitsProcessor(function, init)
    return processing_of(processor, first_carried(processor, TOKENS), None if uses is None else torch.tensor(uses))


def test_tokens_of_rows():
    assert TOKENS.token_ids.tolist() == [[5, 6, 0, 0], [7, 0, 0, 0], [1, 2, 3, 0]] and TOKENS.token_ids.dtype == torch.int32
    assert TOKENS.lengths.tolist() == [2, 1, 3] and TOKENS.lengths.dtype == torch.int32
    assert TOKENS.last().tolist() == [6, 7, 3]
    assert TOKENS.valid().sum(1).tolist() == [2, 1, 3] and TOKENS.valid()[0].tolist() == [True, True, False, False]
    assert "int32[3, 4]" in repr(TOKENS)


def test_a_full_row_is_valid_to_its_end():
    tokens = tokens_of([np.array([5, 6], np.int32)], 2, torch.device("cpu"))
    assert tokens.valid().tolist() == [[True, True]] and tokens.last().tolist() == [6]


class Method:
    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        return logits + 1

    def both(self, logits: torch.Tensor, tokens: nv.TokensSoFar) -> torch.Tensor:
        return logits + tokens.lengths.unsqueeze(1)


class Module(torch.nn.Module):
    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return logits + 1


ONE = [
    lambda logits: logits + 1,
    lambda logits, *, scale=1.0: logits + scale,
    functools.partial(lambda scale, logits: logits + scale, 1.0),
    lambda logits, scale=1.0: logits + scale,
    Method(),
    Module(),
]
TWO = [
    lambda logits, tokens: logits + tokens.lengths.unsqueeze(1),
    lambda logits, tokens=None: logits + tokens.lengths.unsqueeze(1),
    lambda *both: both[0] + both[1].lengths.unsqueeze(1),
    Method().both,
]


@pytest.mark.parametrize("function", ONE)
def test_a_function_of_the_logits(function: Any):
    assert torch.equal(process(LOGITS, TOKENS, [of(function)])[0], LOGITS + 1)


@pytest.mark.parametrize("function", TWO)
def test_a_function_of_logits_and_tokens(function: Any):
    assert torch.equal(process(LOGITS, TOKENS, [of(function)])[0], LOGITS + torch.tensor([[2], [1], [3]]))


def test_a_function_without_a_signature_gets_both():
    assert processing_of(nv.LogitsProcessor(dict.update), None).arguments == 2


def test_functions_run_one_after_the_other_each_for_its_rows():
    seen = []

    def doubled(logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits.clone())
        return logits * 2

    def added(logits: torch.Tensor, tokens: nv.TokensSoFar, carried: dict[str, torch.Tensor]) -> Any:
        count = carried["count"] + 1
        return logits + count[:, :1], {"count": count, "flag": ~carried["flag"]}

    def first(tokens: nv.TokensSoFar) -> dict[str, torch.Tensor]:
        return {"count": tokens.lengths.unsqueeze(1).expand(-1, 2), "flag": tokens.lengths > 9}

    processing = [of(added, first, [True, False, True]), of(doubled, None, [True, True, False])]
    logits, after = process(LOGITS, TOKENS, processing)
    assert torch.equal(logits, torch.stack(((LOGITS[0] + 3) * 2, LOGITS[1] * 2, LOGITS[2] + 4)))
    assert torch.equal(seen[0], torch.stack((LOGITS[0] + 3, LOGITS[1], LOGITS[2] + 4)))
    assert after[0].carried["count"].tolist() == [[3, 3], [1, 1], [4, 4]] and after[0].carried["flag"].tolist() == [True, False, True]
    assert after[1].carried is None
    assert processing[0].carried["count"].tolist() == [[2, 2], [1, 1], [3, 3]]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[:2],
        lambda x: x[:, :3],
        lambda x: x.unsqueeze(0),
        lambda x: x.int(),
        lambda x: x > 0,
        lambda x: None,
        lambda x: (x, x),
        lambda x: 3,
    ],
)
def test_something_else_than_logits_is_refused(function: Any):
    with pytest.raises(nv.InvalidRequestError, match=r"process_logits <lambda> \(.*test_process_logits.py, line \d+\) returns .* \[3, 4\]"):
        process(LOGITS, TOKENS, [of(function)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_logits_of_another_floating_dtype_are_taken(dtype: torch.dtype):
    assert process(LOGITS, TOKENS, [of(lambda x: x.to(dtype))])[0].dtype == dtype


@pytest.mark.parametrize("result", [None, 3, [LOGITS, TOKENS.lengths], (LOGITS,), (LOGITS, TOKENS.lengths, 1), LOGITS])
def test_with_init_a_function_returns_two_values(result: Any):
    with pytest.raises(nv.InvalidRequestError, match="with init it must return logits and carried tensors"):
        process(LOGITS, TOKENS, [of(lambda *given: result, lambda tokens: tokens.lengths)])


@pytest.mark.parametrize(
    "changed",
    [lambda c: c[:2], lambda c: c.long(), lambda c: (c,), lambda c: {"c": c}, lambda c: c.unsqueeze(1)],
)
def test_carried_tensors_keep_their_shapes(changed: Any):
    with pytest.raises(nv.InvalidRequestError, match="must stay the same"):
        process(LOGITS, TOKENS, [of(lambda logits, tokens, carried: (logits, changed(carried)), lambda tokens: tokens.lengths)])


@pytest.mark.parametrize(
    "first", [None, 3, (), {}, torch.zeros(2), torch.zeros(()), [torch.zeros(3), torch.zeros(4)], [torch.zeros(3), 1], {"a": None}]
)
def test_init_returns_tensors_of_all_rows(first: Any):
    with pytest.raises(nv.InvalidRequestError, match="every leaf must be a tensor whose first axis has 3 rows"):
        of(lambda *given: given, lambda tokens: first)


def test_what_stands_for_a_processor():
    processor = nv.LogitsProcessor(Method())
    assert as_processor(None) is None and as_processor(processor) is processor
    both = TWO[0]
    made = as_processor(both)
    assert made == nv.LogitsProcessor(both) and made is not None and made.init is None
    assert nv.LogitsProcessor(Method.both, len) != replace(processor, function=Method.both)
    for wrong in (3, "max", [Method()]):
        with pytest.raises(nv.InvalidRequestError, match="must be a function of the logits, or a LogitsProcessor"):
            as_processor(wrong)


@pytest.mark.parametrize(
    ("wrong", "wanted"),
    [
        (lambda logits, tokens, carried: logits, r"for a function that carries tensors pass LogitsProcessor\(function, init\)"),
        (lambda: None, "must take the logits, or the logits and the tokens"),
        (lambda *, logits: logits, "must take the logits, or the logits and the tokens"),
        (
            nv.LogitsProcessor(lambda logits, tokens: logits, len),
            "must take the logits, the tokens and what it carries",
        ),
    ],
)
def test_a_function_of_other_arguments_is_refused(wrong: Any, wanted: str):
    with pytest.raises(nv.InvalidRequestError, match=wanted):
        as_processor(wrong)


@pytest.mark.parametrize("function", [*ONE, *TWO, dict.update, lambda logits, temperature=1.0: logits])
def test_a_function_that_can_be_called_is_not_refused(function: Any):
    assert as_processor(function) is not None


def test_logits_of_inference_mode_are_not_changed_in_place_either():
    with torch.inference_mode():
        logits = LOGITS.clone()
        with pytest.raises(nv.InvalidRequestError, match="in place"):
            process(logits, TOKENS, [of(lambda logits: logits.fill_(0.0))])
        assert torch.equal(logits, LOGITS)
        assert torch.equal(process(logits, TOKENS, [of(lambda logits: logits + 1)])[0], LOGITS + 1)


def test_init_gives_every_prompt_rows_of_one_shape():
    processor = nv.LogitsProcessor(lambda *given: given, lambda tokens: tokens.lengths)
    require_alike(processor, {"a": torch.zeros(2)}, {"a": torch.ones(2)})
    for other in ({"a": torch.zeros(3)}, {"a": torch.zeros(2).int()}, {"b": torch.zeros(2)}, torch.zeros(2)):
        with pytest.raises(nv.InvalidRequestError, match="must not depend on the prompt"):
            require_alike(processor, {"a": torch.zeros(2)}, other)
