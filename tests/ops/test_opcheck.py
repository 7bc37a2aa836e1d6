"""`torch.library.opcheck` on every custom op: schema, mutation, fake and tracing agree with what the kernel does."""

import pytest
import torch

import nanovllm  # noqa: F401, registers the ops
from nanovllm.testing.problems import attention_problem, linear_problem


def pool(dtype=torch.float32):
    return torch.randn(2, 5, 2, 2, 4, 8, dtype=dtype)


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def arguments(name):
    q, kv = torch.randn(3, 4, 8), torch.randn(3, 2, 8)
    tables, seq_lens = int32([[0, 3], [2, 4]]), int32([6, 3])
    return {
        "kv_write": (pool(), 1, kv, kv + 1, int32([3, 9, 16])),
        "move_kv": (pool(), int32([3, 9]), int32([16, 12]), int32([-4, 1000]), torch.rand(4)),
        "copy_pages": (pool(), int32([0, 3]), int32([2, 1])),
        "gather_pages": (pool(), int32([0, 3]), pool()[:, :2].transpose(0, 1).contiguous()),
        "scatter_pages": (pool(), int32([0, 3]), pool()[:, :2].transpose(0, 1).contiguous()),
        "paged_prefill": (q, pool(), 1, tables, seq_lens, int32([0, 2, 3]), 0.3, 0),
        "paged_decode": (q[:2], pool(), 1, tables, seq_lens, 0.3, 0),
        "norm_linear": (*linear_problem(3, 8, 16, False, True, True, torch.float32), (4, 2, 0)),
        "norm_linear, gelu": (*linear_problem(3, 8, 16, True, True, False, torch.bfloat16, gains=torch.float32), (), "gelu_tanh"),
        "linear_add_norm, normed": (*(torch.randn(*shape) for shape in ((3, 16), (8, 16), (8,), (3, 8), (8,))), 1e-6, (), torch.rand(8)),
        "norm_add": (torch.randn(3, 8), torch.rand(8), torch.randn(3, 8), 1e-6),
        "norm_add, alone": (torch.randn(3, 8).bfloat16(), torch.rand(8), None, 1e-6),
        "linear_add_norm": (torch.randn(3, 16), torch.randn(8, 16), torch.randn(8), torch.randn(3, 8), torch.rand(8), 1e-6, (0,)),
        "rope_attend": (*attention_problem([5, 9], 4, 2, 8, 4, True, torch.float32), 0),
        "rope_write": (*(p := attention_problem([5, 9], 4, 2, 8, 4, True, torch.float32))[:7], *p[9:10], p[11]),
        "paged_prefill, limited": (q, pool(), 1, tables, seq_lens, int32([0, 2, 3]), 0.3, 0, None, None, 3, 2.0),
        "paged_decode, limited": (q[:2], pool(), 1, tables, seq_lens, 0.3, 0, 3, 2.0),
        "rope_attend, limited": (*attention_problem([5, 9], 4, 2, 8, 4, True, torch.float32), 0, 3, 2.0),
        "capped_logits": (torch.randn(3, 7).bfloat16(), 2.0),
        "rotary_angles": (int32([0, 9]), torch.rand(4), 1.0),
        "next_places": (int32([2, 9]), int32([1, 8]), tables, int32([0, 1]), 5, 4),
        "highest": (torch.randn(3, 7),),
        "penalised": (
            torch.randn(2, 7),
            int32([1, -1]),
            torch.ones(3, 7).int(),
            torch.rand(3, 7),
            *torch.rand(3, 2).unbind(),
            int32([0, -1]),
            int32([[21]]),
        ),
        "adjusted": (torch.randn(2, 7), torch.rand(2, 7), torch.rand(2, 7) > 0.5, torch.ones(2, 7).int(), *torch.rand(3, 2).unbind()),
        "token_logprobs": (torch.randn(2, 7), int32([3, 0]), 4),
        "least_kept": (torch.randn(3, 7), torch.ones(3), int32([2, 0, 1]), torch.full((3,), 0.5), None, None),
    }[name]


@pytest.mark.compile
@pytest.mark.parametrize(
    "name",
    ["kv_write", "copy_pages", "move_kv", "paged_prefill", "paged_decode", "norm_linear", "linear_add_norm", "rope_attend", "rope_write",
     "gather_pages", "scatter_pages",
     "rotary_angles", "next_places", "highest", "least_kept", "penalised", "adjusted", "token_logprobs",
     "paged_prefill, limited", "paged_decode, limited", "rope_attend, limited",
     "norm_linear, gelu", "linear_add_norm, normed", "norm_add", "norm_add, alone", "capped_logits"],
)  # fmt: skip
def test_opcheck(name):
    torch.library.opcheck(getattr(torch.ops.nanovllm, name.split(",")[0]).default, arguments(name))
