"""The table of plans: handles are never reused and die with their plan."""

import gc

import pytest
import torch

from nanovllm.errors import NanoVLLMError
from nanovllm.ops.attention.flashinfer_plans import prefill_kernel
from nanovllm.ops.attention.plan_table import PlanMismatchError, UnknownPlanError, lookup, register
from nanovllm.ops.backends import attention_backend


class Plan:
    pass


def test_a_handle_finds_its_plan():
    a, b = Plan(), Plan()
    ha, hb = register(a), register(b)
    assert lookup(ha) is a
    assert lookup(hb) is b
    assert 0 not in (ha, hb)


def test_a_handle_dies_with_its_plan_and_is_not_given_out_again():
    plan = Plan()
    handle = register(plan)
    del plan
    gc.collect()
    with pytest.raises(UnknownPlanError, match=str(handle)):
        lookup(handle)
    other = Plan()
    assert register(other) > handle


@pytest.mark.parametrize("handle", [0, -1, 10**9])
def test_an_unknown_handle_is_a_typed_error(handle):
    with pytest.raises(NanoVLLMError, match=f"handle {handle};"):
        lookup(handle)


def test_a_plan_of_another_kind_is_a_typed_error():
    plan = Plan()
    assert lookup(register(plan), Plan) is plan
    with pytest.raises(PlanMismatchError, match="is a Plan, but this op takes a str"):
        lookup(register(plan), str)


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim"),
    [("cpu", torch.bfloat16, 128), ("cuda", torch.float32, 128), ("cuda", torch.float64, 64), ("cuda", torch.bfloat16, 96)],
)
def test_what_flashinfer_cannot_serve_goes_to_the_reference(device, dtype, head_dim):
    assert attention_backend(torch.device(device), dtype, head_dim, 16) == "reference"


# Rows of new tokens by prompts: which kernel was faster on an H200 with 16 query and 8 key/value heads of 128.
@pytest.mark.parametrize(
    ("rows", "tokens", "faster"),
    [
        (1, 16384, "fa3"),
        (1, 8192, "fa3"),
        (1, 512, "fa3"),
        (16, 16 * 512, "fa3"),
        (64, 64 * 128, "fa3"),
        (32, 32 * 256, "fa3"),
        (1, 128, "fa2"),
        (1, 16, "fa2"),
        (64, 63 + 1024, "fa2"),
        (64, 64 * 16, "fa2"),
        (64, 64 * 64, "fa2"),
    ],
)
def test_the_prefill_kernel_is_the_one_measured_faster(rows, tokens, faster):
    assert prefill_kernel(tokens, rows, 16) == faster


@pytest.mark.interpret
@pytest.mark.parametrize("rows", [1, 3, 1023, 1024, 1025])
@pytest.mark.parametrize("page_size", [1, 16])
def test_lengths_in_last_pages_interpreted(rows, page_size):
    """Rows on either side of the 1,024 of a program; where more pages are planned than are reached, lengths are not positive."""
    from nanovllm.ops.kv_cache import triton_kv

    pages, seq_lens = torch.randint(1, 5, (rows,)), torch.randint(1, 4 * page_size + 1, (rows,), dtype=torch.int32)
    indptr = torch.nn.functional.pad(pages.cumsum(0), (1, 0)).int()
    out = torch.full((rows + 1,), -99, dtype=torch.int32)
    triton_kv.last_page_lens(out[:rows], seq_lens, indptr, page_size)
    assert out.tolist() == [n - (count - 1) * page_size for n, count in zip(seq_lens.tolist(), pages.tolist(), strict=True)] + [-99]
