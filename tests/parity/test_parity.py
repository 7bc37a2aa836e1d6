"""Compare models with transformers (`tests.parity`), with random weights that transformers saves and `load_model` loads."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanovllm import models
from nanovllm.config import for_length
from nanovllm.engine.init_state import init_state
from nanovllm.entrypoints.llm import LLM
from nanovllm.errors import CheckpointError, InvalidRequestError
from nanovllm.loading.load_model import load_model, read_config
from nanovllm.testing.driver import layout, run_chunks, run_greedy, step_batch
from tests.parity.cases import CASES, KINDS
from tests.parity.chunks import chunk_errors
from tests.parity.logits import bfloat16_ratios, decode_path, float32_error
from tests.parity.pair import Pair, build
from tests.parity.replies import WAYS, batched, judged

pytestmark = (
    pytest.mark.unhooked
)  # the hook makes these tests three times as long; tests/models and the long runs check the same shapes with it
PLAIN = [f"{kind}: plain" for kind in KINDS]
# Unusual settings that change operations on chunks or the engine.
ODD_KEYS = {
    "phi3": ("longrope, long", "half of a head turns, window 9"),
    "ernie4_5": ("biases, head_dim 18",),
    "gemma3": ("biases, untied",),
}
MOVED = [f"{kind}: {setting}" for kind, settings in ODD_KEYS.items() for setting in settings]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Pair]:
    """Cases by name, built at first use."""

    class Built(dict[str, Pair]):
        def __missing__(self, name: str) -> Pair:
            return self.setdefault(name, build(CASES[name], tmp_path_factory.mktemp("case")))

    return Built()


def test_every_architecture_has_cases() -> None:
    assert {case.architecture for case in CASES.values()} == set(models.REGISTRY)


@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_tokens(name: str, tmp_path: Path) -> None:
    pair, plain = build(CASES[name], tmp_path), name in PLAIN
    error = float32_error(pair, chunks=((16, 1) if plain else (33, 4),), single=plain)
    assert error.ours <= error.bound
    found = judged(pair, batched(pair, 64 if plain else 12), error.bound)
    assert found.agreed == found.clear > found.drawn / 2
    assert found.logprob_error <= 2 * error.bound


@pytest.mark.parametrize("name", PLAIN)
def test_replies_are_the_same_in_every_way(name: str, pairs: Mapping[str, Pair]) -> None:
    pair = pairs[name]
    outputs = {way: ask(pair, 12) for way, ask in WAYS.items()}
    for found in (judged(pair, some, 1e-4) for some in outputs.values()):
        assert found.agreed == found.clear > 0.9 * found.drawn
        assert found.logprob_error <= 2e-4
    ids = {way: [output.token_ids for output in some] for way, some in outputs.items()}
    assert ids["plain"] == ids["alone"] == ids["reused"]


@pytest.mark.parametrize("name", PLAIN)
def test_bfloat16_errs_no_more_than_theirs(name: str, pairs: Mapping[str, Pair]) -> None:
    for ratio in bfloat16_ratios(pairs[name], most=1):
        assert ratio.no_larger
        assert ratio.value < 1.1


@pytest.mark.parametrize("name", [*PLAIN, *MOVED])
def test_chunks_are_exact_or_moved_or_refused_with_a_reason(name: str, pairs: Mapping[str, Pair]) -> None:
    found = chunk_errors(pairs[name])
    assert found.exact <= 1e-5
    assert found.moved <= 1e-5
    assert ("learned positions, so it does not support" in found.refused) == (CASES[name].kind == "gpt2") == bool(found.refused)


@pytest.mark.parametrize("name", PLAIN)
def test_a_row_is_bitwise_the_same_in_any_batch(name: str, pairs: Mapping[str, Pair]) -> None:
    pair = pairs[name]
    prompts = pair.draw(5, 3, 17, 40, 9, 1)
    together = run_greedy(pair.ours, prompts, 6)
    for i, prompt in enumerate(prompts[:3]):
        ids, logits = run_greedy(pair.ours, [prompt], 6)
        assert ids[0] == together[0][i]
        assert torch.equal(logits[0], together[1][i])


def test_the_decode_path_is_named(pairs: Mapping[str, Pair]) -> None:
    assert {decode_path(pairs[f"{kind}: plain"].ours) for kind in ("qwen3", "llama", "phi3")} <= {"C", "torch: no C compiler"}
    assert decode_path(pairs["gpt2: plain"].ours) == "torch: layer norms with biases"


@pytest.mark.parametrize("name", ["qwen3: plain", "llama: llama3 rope"])
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_dtypes_are_as_close_as_theirs(name: str, dtype: str, pairs: Mapping[str, Pair]) -> None:
    pair = pairs[name]
    ours, row, kind = pair.load(dtype), pair.draw(3, 33), getattr(torch, dtype)
    logits = run_chunks(ours, row, layout(ours, [33], 4), 7)[0]
    assert logits.dtype == kind
    # transformers computes norms in float32 even in its float64 run, so the bound of float32 applies to our float64 run.
    exact = pair.reference(row, torch.float64)[0]
    theirs = pair.reference(row, torch.float32 if kind == torch.float64 else kind)[0].double()
    assert (logits.double() - exact).abs().mean().item() <= 1.25 * (theirs - exact).abs().mean().item()


def test_logit_indices_pick_rows(pairs: Mapping[str, Pair]) -> None:
    pair = pairs["llama: head_dim 22"]
    ours, rows = pair.ours, pair.draw(4, 9, 5)
    at = layout(ours, [9, 5], 4)
    batch = step_batch(at, [(i, row, 0) for i, row in enumerate(rows)], ours.device)
    whole, kv = models.forward(ours.params, at.kv, batch, ours.config)
    picked, _ = models.forward(ours.params, kv, replace(batch, logit_indices=torch.tensor([13, 8], dtype=torch.int32)), ours.config)
    assert kv.pools[0].data_ptr() == at.kv.pools[0].data_ptr()
    assert torch.equal(picked, whole[[13, 8]])


def test_longrope_is_chosen_by_the_context_that_is_asked_for(pairs: Mapping[str, Pair]) -> None:
    folder = pairs["phi3: longrope, long"].folder
    short, long = load_model(folder), load_model(folder, max_model_len=65)
    assert [model.config.max_position_embeddings for model in (short, long)] == [64, 256]
    assert [model.config.rope.factors[-1] for model in (short, long)] == [4.5, 16.0]
    assert short.fingerprint != long.fingerprint
    assert load_model(folder, max_model_len=64).fingerprint == short.fingerprint
    with pytest.raises(InvalidRequestError, match="max_model_len=65 exceeds the model's 64 positions; pass max_model_len to load_model"):
        init_state(short, max_model_len=65, num_pages=8)
    with pytest.raises(InvalidRequestError, match=r"256 positions$"):
        init_state(long, max_model_len=257, num_pages=8)
    assert LLM(folder, num_pages=8).state.config.max_model_len == 64
    assert LLM(folder, num_pages=8, max_model_len=200).model.fingerprint == long.fingerprint
    with pytest.raises(InvalidRequestError, match="max_model_len=0"):
        load_model(folder, max_model_len=0)


def test_the_length_changes_nothing_where_there_is_one_rope(pairs: Mapping[str, Pair]) -> None:
    _, config = read_config(pairs["llama: llama3 rope"].folder)
    assert for_length(config, 17) == for_length(config, None) == config


def test_experts_with_biases_are_refused(pairs: Mapping[str, Pair]) -> None:
    read = models.REGISTRY["Ernie4_5_MoeForCausalLM"].config_from_hf
    theirs = pairs["ernie4_5_moe: plain"].theirs.config.to_dict()
    assert not read(theirs).mlp_bias
    with pytest.raises(CheckpointError, match="use_bias=true is not supported with experts"):
        read({**theirs, "use_bias": True})
