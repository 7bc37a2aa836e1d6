"""How many copies of the key/value memory compiled code makes: none, if whole `pages` and a layer index go to a mutating op.

This is what makes the functional signature of `forward` free. The other rows are what not to write, and why.
"""

import math
import re

import numpy as np
import pytest
import torch
from torch._inductor.utils import run_and_get_code

from nanovllm.executor.cascade_policy import own_runs
from nanovllm.ops import kv_write, paged_decode
from nanovllm.ops.attention.cascade_plan import CascadePlan, CascadeWorkspace
from nanovllm.state.kv_cache import KVState

pytestmark = pytest.mark.compile

L, N, K, S, D = 4, 32, 2, 16, 64
ONE_LAYER = N * 2 * K * S * D
library = torch.library.Library("nanovllm_tests", "FRAGMENT")
ops = torch.ops.nanovllm_tests


def define(name, schema, kernel, fake):
    library.define(f"{name}{schema}")
    library.impl(name, kernel, "CPU")
    torch.library.register_fake(f"nanovllm_tests::{name}", fake, lib=library)


def write_layer(pages, k, slots):
    pages.permute(0, 3, 1, 2, 4)[slots // S, slots % S] = torch.stack((k, k), 1)


def write_half(pages, k, slots):
    pages.permute(0, 2, 1, 3)[slots // S, slots % S] = k


def write_and_attend(pages, layer, k, slots):
    kv_write(pages, layer, k, k, slots)
    return paged_decode(k, pages, layer, (slots // S)[:, None], slots % S + 1, 0.1, 0)


copies = []


def write_into_new(pages, layer, k, slots):
    copies.append(layer)
    pages = pages.clone()
    kv_write(pages, layer, k, k, slots)
    return pages


define("write_layer", "(Tensor(a!) pages, Tensor k, Tensor slots) -> ()", write_layer, lambda pages, k, slots: None)
define("write_half", "(Tensor(a!) pages, Tensor k, Tensor slots) -> ()", write_half, lambda pages, k, slots: None)
define(
    "write_and_attend",
    "(Tensor(a!) pages, SymInt layer, Tensor k, Tensor slots) -> Tensor",
    write_and_attend,
    lambda pages, layer, k, slots: torch.empty_like(k),
)
define(
    "write_into_new",
    "(Tensor pages, SymInt layer, Tensor k, Tensor slots) -> Tensor",
    write_into_new,
    lambda pages, layer, k, slots: torch.empty_like(pages),
)


def whole_pages_and_layer(pages, k, slots):
    for layer in range(L):
        kv_write(pages, layer, k + layer, k, slots)
    return pages


def view_of_a_layer(pages, k, slots):
    for layer in range(L):
        ops.write_layer(pages[layer], k + layer, slots)
    return pages


def views_of_keys_and_values(pages, k, slots):
    for layer in range(L):
        ops.write_half(pages[layer, :, 0], k + layer, slots)
        ops.write_half(pages[layer, :, 1], k, slots)
    return pages


def fused_write_and_attend(pages, k, slots):
    for layer in range(L):
        k = ops.write_and_attend(pages, layer, k + layer, slots)
    return pages


def written_in_traced_code(pages, k, slots):
    for layer in range(L):
        write_layer(pages[layer], k + layer, slots)
    return pages


def op_that_returns_new_pages(pages, k, slots):
    for layer in range(L):
        pages = ops.write_into_new(pages, layer, k + layer, slots)
    return pages


def inputs():
    torch.manual_seed(0)
    return torch.randn(L, N, 2, K, S, D), torch.randn(3, K, D), torch.tensor([1, 40, 77], dtype=torch.int32)


def compiled(program, pages, k, slots, **options):
    """The result of a program over `KVState`, compiled whole, and its generated code."""

    def run(kv, k, slots):
        return KVState(pools=(program(kv.pools[0], k, slots),))

    torch._dynamo.reset()
    with torch.no_grad():
        out, codes = run_and_get_code(torch.compile(run, fullgraph=True, **options), KVState(pools=(pages,)), k, slots)
    return out.pools[0], "\n".join(codes)


def large_allocations(code):
    """Buffers of at least one layer that the generated code allocates itself."""
    shapes = [[int(n) for n in re.findall(r"\d+", shape)] for shape in re.findall(r"empty_strided\w*\(\(([^()]*)\)", code)]
    return [shape for shape in shapes if math.prod(shape) >= ONE_LAYER]


@pytest.mark.parametrize("program", [whole_pages_and_layer, view_of_a_layer, views_of_keys_and_values, fused_write_and_attend])
def test_a_mutating_op_copies_nothing(program):
    pages, k, slots = inputs()
    want = program(pages.clone(), k, slots)
    out, code = compiled(program, pages, k, slots)
    torch.testing.assert_close(out, want)
    assert out.data_ptr() == pages.data_ptr()
    assert large_allocations(code) == []


@pytest.mark.parametrize("program", [whole_pages_and_layer, fused_write_and_attend])
def test_whole_pages_and_a_layer_index_are_right_under_dynamic_shapes(program):
    pages, k, slots = inputs()
    want = program(pages.clone(), k, slots)
    out, code = compiled(program, pages, k, slots, dynamic=True)
    torch.testing.assert_close(out, want)
    assert out.data_ptr() == pages.data_ptr()
    assert not re.search(r"empty_strided\w*\(\((?:[^(),]+, ){4}", code)  # nothing of five or more axes


@pytest.mark.parametrize("program", [view_of_a_layer, views_of_keys_and_values])
def test_a_view_may_lose_its_offset_under_dynamic_shapes(program):
    """Why our ops take whole `pages`: torch 2.13 passes every `pages[layer]` with offset 0, and all layers land in layer 0."""
    pages, k, slots = inputs()
    want = program(pages.clone(), k, slots)
    out, _ = compiled(program, pages, k, slots, dynamic=True)
    if not torch.equal(out, want):
        assert not torch.equal(out[0], want[0])
        assert torch.equal(out[L - 1], inputs()[0][L - 1])  # never written
        pytest.xfail(f"torch {torch.__version__} drops the offset of a view that a custom op writes")


def test_pages_written_in_traced_code_are_copied():
    pages, k, slots = inputs()
    want = written_in_traced_code(pages.clone(), k, slots)
    out, code = compiled(written_in_traced_code, pages, k, slots)
    torch.testing.assert_close(out, want)
    assert len(large_allocations(code)) >= 1


def test_an_op_that_returns_new_pages_copies_them_all_each_time():
    pages, k, slots = inputs()
    want = op_that_returns_new_pages(pages.clone(), k, slots)
    before = pages.clone()
    copies.clear()
    out, code = compiled(op_that_returns_new_pages, pages, k, slots)
    torch.testing.assert_close(out, want)
    assert torch.equal(pages, before)
    assert len(copies) == code.count("write_into_new.default(") == L


def test_a_clone_between_writes_is_lost():
    """Silently wrong in torch 2.11 to 2.13, and why nothing in a step copies `pages` in order to keep it (pytorch issue 198031).

    The clone is dropped while the graph is functional, and the write after it is then made in place.
    """

    def program(pages, k, slots):
        kv_write(pages, 1, k, k, slots)
        old = pages.clone()
        kv_write(pages, 0, k, k, slots)
        return old

    pages, k, slots = inputs()
    before, want = pages.clone(), program(pages.clone(), k, slots)
    old, _ = compiled(program, pages, k, slots)
    assert torch.equal(want[0], before[0])  # eager: the copy is of the time before the last write
    if not torch.equal(old, want):
        assert torch.equal(old, pages)  # compiled: the copy is the memory after it
        pytest.xfail(f"torch {torch.__version__} drops a clone between two in-place writes")


def test_other_layers_and_plans_do_not_compile_anew():
    """The handle of a plan and the layer are symbols once they have changed: one function serves all layers and batch buckets."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def layer_step(q, pages, layer, tables, seq_lens, plan):
        kv_write(pages, layer, q, q, seq_lens)
        return paged_decode(q, pages, layer, tables, seq_lens, 0.1, plan)

    torch._dynamo.reset()
    compiled = torch.compile(layer_step, fullgraph=True, backend=backend)
    pages, q, slots = inputs()
    rows, heads = q.shape[:2]
    space, plans = CascadeWorkspace(rows, heads, q.shape[2], q.device), []
    with torch.no_grad():
        for _ in range(3):
            plans.append(CascadePlan(space, rows, heads, pages.shape[3], S, q.device))
            assert plans[-1].update(own_runs(np.ones(rows, np.int32)))
            for layer in range(L):
                compiled(q, pages, layer, (slots // S)[:, None], slots % S + 1, plans[-1].handle)
    assert len(graphs) <= 5  # layers 0 and 1 are specialised, each with a constant and then a symbolic plan; one for the rest
