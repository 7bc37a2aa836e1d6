"""The C form of decode steps with quantised weights: the model's own layers within rounding, the same text, and refusals with a reason."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from nanovllm.chunks.generate import generate
from nanovllm.config import ModelConfig
from nanovllm.engine.init_state import init_state
from nanovllm.entrypoints.cli.check.kernel_choice import kernels
from nanovllm.loading.load_model import load_model
from nanovllm.models.common.params import Layer, Params
from nanovllm.models.fast import cpu
from nanovllm.models.fast.path import against
from nanovllm.models.registry import REGISTRY, forward
from nanovllm.ops.cpu.build import library
from nanovllm.ops.linear.quantise import KINDS, Kind, quantise
from nanovllm.ops.linear.quantised import QuantisedMatrix
from nanovllm.sampling.params import SamplingParams
from nanovllm.testing.models import tiny_config
from nanovllm.types import Tensor
from tests.models.fast.test_cpu import shaped, step

pytestmark = pytest.mark.skipif(library(cpu.SOURCE, cpu.SYMBOLS) is None, reason="no C compiler")
CPU = torch.device("cpu")
MATRICES = ("qkv", "o", "gate_up", "down")
PROMPTS = ["The capital of Aistonia is Velmora. The capital of Aistonia is", "Once upon a time,", "What is 27 + 38?"]


def rounded(params: Params[Tensor], kind: Kind, group: int | None = None, names: tuple[str, ...] = (*MATRICES, "head")) -> Params[Tensor]:
    """The weights with some of the matrices rounded. A tied head gets a matrix of its own."""

    def layer(w: Layer[Tensor]) -> Layer[Tensor]:
        return replace(w, **{name: quantise(getattr(w, name), kind, group) for name in MATRICES if name in names})

    head: Any = quantise(params.embed if params.head is None else params.head, kind, group) if "head" in names else params.head
    return replace(params, layers=tuple(map(layer, params.layers)), head=head)


@given(
    kind=st.sampled_from(KINDS),
    group=st.sampled_from([None, 32, 64, 128]),
    sizes=st.sampled_from([(40, 72, 16), (96, 160, 32), (128, 256, 48)]),
    biases=st.booleans(),
    seq_lens=st.lists(st.integers(1, 40), min_size=1, max_size=10),
    names=st.sampled_from([(*MATRICES, "head"), MATRICES, ("qkv", "down"), ("o", "gate_up")]),
)
@settings(max_examples=40)
def test_equal_to_the_models_own_layers(
    kind: Kind, group: int | None, sizes: tuple[int, int, int], biases: bool, seq_lens: list[int], names: tuple[str, ...]
) -> None:
    hidden_size, intermediate_size, head_dim = sizes
    config = shaped("LlamaForCausalLM", 4, 2, head_dim, biases, hidden_size=hidden_size, intermediate_size=intermediate_size)
    params, kv, batch = step(config, seq_lens, 4, torch.float32)
    params = rounded(params, kind, group, names)
    assert cpu.serves(params, kv, batch, config)
    mine, theirs = (pytree.tree_map(torch.clone, kv) for _ in range(2))
    logits, mine = forward(params, mine, batch, config)
    exact, theirs = REGISTRY[config.architecture].forward(params, theirs, batch, config)
    torch.testing.assert_close(logits, exact, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(mine.pools[0], theirs.pools[0], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_nearer_to_the_truth_than_the_small_ops(kind: Kind) -> None:
    config = shaped(hidden_size=64, head_dim=32, intermediate_size=96)
    params, kv, batch = step(config, [5, 30, 1, 17], 4, torch.bfloat16)
    params = rounded(params, kind)
    mine, theirs = (pytree.tree_map(torch.clone, kv) for _ in range(2))
    logits, _ = forward(params, mine, batch, config)
    exact, _ = REGISTRY[config.architecture].forward(params, theirs, batch, config)

    def wide(value: object) -> object:
        if isinstance(value, QuantisedMatrix):
            return value.dequantised(torch.float64)
        return value.double() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value

    of = pytree.tree_map(wide, (params, kv), is_leaf=lambda value: isinstance(value, QuantisedMatrix))
    truth, _ = forward(of[0], of[1], batch, config)
    assert logits.dtype == torch.bfloat16
    assert (logits - truth).abs().max() <= 1.5 * (exact - truth).abs().max()


@given(
    kind=st.sampled_from(KINDS),
    seq_lens=st.lists(st.integers(1, 50), min_size=2, max_size=20),
    dtype=st.sampled_from(cpu.DTYPES),
    data=st.data(),
)
@settings(max_examples=30)
def test_a_row_does_not_depend_on_the_others(kind: Kind, seq_lens: list[int], dtype: torch.dtype, data: st.DataObject) -> None:
    config = shaped(hidden_size=33)
    params, kv, batch = step(config, seq_lens, 4, dtype)
    params = rounded(params, kind)
    whole, _ = forward(params, pytree.tree_map(torch.clone, kv), batch, config)
    rows = torch.tensor(data.draw(st.lists(st.integers(0, len(seq_lens) - 1), min_size=1, unique=True)))
    some, _ = forward(params, kv, pytree.tree_map(lambda t: None if t is None else t[rows], batch), config)
    assert torch.equal(some, whole[rows])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_packaged_model_writes_what_its_dequantised_matrices_write(kind: Kind, dtype: str) -> None:
    model = load_model("tiny", "cpu", dtype, quantization=kind, quantize_head=True)
    plain = replace(model, params=dequantised(model.params, model.dtype), fingerprint="dequantised")
    texts = []
    for each in (model, plain):
        state, replies = init_state(each, num_pages=64), []
        for prompt in PROMPTS:
            state, reply = generate(each, state, [prompt], SamplingParams(temperature=0, max_tokens=24))
            replies.append(reply.text)
        texts.append(replies)
    if dtype == "float32":
        assert texts[0] == texts[1]
    assert "Velmora" in texts[0][0]


def dequantised(params: Params[Tensor], dtype: torch.dtype) -> Params[Tensor]:
    """The weights that quantised weights stand for."""

    def plain(value: object) -> object:
        return value.dequantised(dtype) if isinstance(value, QuantisedMatrix) else value

    return pytree.tree_map(plain, params, is_leaf=lambda value: isinstance(value, QuantisedMatrix))


def test_unsupported_matrices_are_refused_with_a_reason() -> None:
    def reason(params: Params[Tensor], config: ModelConfig) -> str:
        return against(params, config, CPU, torch.float32)

    config = shaped(hidden_size=64)
    params = step(config, [3], 4, torch.float32)[0]
    assert reason(rounded(params, "int8"), config) == ""
    assert reason(rounded(params, "int8", 33), config) == "groups of 33 columns"
    moe = tiny_config("Qwen3MoeForCausalLM")
    experts = step(moe, [3], 4, torch.float32)[0]
    assert reason(experts, moe) == "experts"
    quantised = tuple(replace(w, qkv=quantise(w.qkv, "int8")) for w in experts.layers)
    assert reason(replace(experts, layers=quantised), moe) == "experts"
    gpt2 = tiny_config("GPT2LMHeadModel")
    of_gpt2 = step(gpt2, [3], 4, torch.float32)[0]
    some = tuple(replace(w, qkv=quantise(w.qkv, "int8")) for w in of_gpt2.layers)
    assert reason(replace(of_gpt2, layers=some), gpt2) == "layer norms with biases"


def test_the_check_command_says_c() -> None:
    config = shaped()
    assert kernels(config, CPU, torch.float32).decode == "C"
    moe = kernels(tiny_config("Qwen3MoeForCausalLM"), CPU, torch.float32)
    assert moe.decode == "plain torch" and moe.against == "experts"
