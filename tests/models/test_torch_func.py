"""`forward` without KV memory: the logits of prefill, under `torch.func` and `torch.compile`. Hidden states, added and returned."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, vmap
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import nanovllm as nv
from nanovllm.errors import InvalidRequestError
from nanovllm.executor import compiled
from nanovllm.models.common import decoder, layers
from nanovllm.models.common.batch import Batch
from nanovllm.models.fast import cpu, fused
from nanovllm.models.fast.choice import FastChoice
from nanovllm.models.model import Model
from nanovllm.models.registry import REGISTRY, forward
from nanovllm.ops.cpu.build import library
from nanovllm.ops.elementwise.norm_rope import rms_norm
from nanovllm.testing.driver import Layout, layout, step_batch
from nanovllm.testing.models import random_model, tiny_config
from tests.loading.transformers.made import GROUPED, save
from tests.parity.cases import CASES
from tests.parity.pair import build

SOME = ("Qwen3ForCausalLM", "Gemma2ForCausalLM", "Ernie4_5_MoeForCausalLM", "GPT2LMHeadModel")
ROWS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 3, 4], [1], [20, 21, 22, 23] * 3]  # two are longer than the windows, which are 8
SHORT = [[5, 9, 7], [1, 2]]


def prefilled(model: Model, rows: list[list[int]] = ROWS) -> tuple[Layout, Batch]:
    """KV memory, and the batch that fills it with whole prompts."""
    at = layout(model, [len(row) for row in rows], 4)
    return at, step_batch(at, [(i, row, 0) for i, row in enumerate(rows)], model.device)


def decoding(model: Model, rows: list[list[int]] = ROWS) -> tuple[nv.KVState, Batch]:
    """KV memory filled with the tokens of each row but the last, and the decode batch of the last tokens."""
    at = layout(model, [len(row) for row in rows], 4)
    before = step_batch(at, [(i, row[:-1], 0) for i, row in enumerate(rows) if len(row) > 1], model.device)
    _, kv = model.spec.forward(model.params, at.kv, before, model.config)
    return kv, step_batch(at, [(i, row[-1:], len(row) - 1) for i, row in enumerate(rows)], model.device, decode=True)


def embeddings(model: Model, batch: Batch) -> Tensor:
    return model.params.embed[batch.input_ids]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("architecture", REGISTRY)
def test_without_kv_the_logits_are_those_of_prefill(architecture: str, dtype: str) -> None:
    model = random_model(tiny_config(architecture), dtype=dtype)
    at, batch = prefilled(model)
    want, _ = forward(model.params, at.kv, batch, model.config)
    prompts = Batch.of_prompts(ROWS)
    got, none = forward(model.params, None, prompts, model.config)
    assert none is None
    torch.testing.assert_close(got, want)
    last, _ = model.spec.forward(model.params, None, Batch.of_prompts(ROWS, last_only=True), model.config)
    torch.testing.assert_close(last, got[[11, 12, 24]])


@pytest.mark.parametrize("architecture", SOME)
def test_without_kv_bfloat16_is_as_exact_as_prefill(architecture: str) -> None:
    model = random_model(tiny_config(architecture), dtype="bfloat16")
    wide = replace(model, params=pytree.tree_map(lambda w: w.double() if isinstance(w, Tensor) else w, model.params))
    wide = replace(wide, params=replace(wide.params, inv_freq=model.params.inv_freq), dtype=torch.float64)
    at, batch = prefilled(model)
    exact, _ = forward(wide.params, None, batch, model.config)
    paged, _ = forward(model.params, at.kv, batch, model.config)
    got, _ = forward(model.params, None, batch, model.config)
    assert got.dtype == torch.bfloat16
    assert (got - exact).abs().mean() <= 1.1 * (paged - exact).abs().mean()


def test_without_kv_slots_tables_and_lengths_are_not_read() -> None:
    model = random_model(tiny_config("Gemma2ForCausalLM"))
    _, batch = prefilled(model)
    want, _ = forward(model.params, None, batch, model.config)
    spoilt = {name: torch.full_like(getattr(batch, name), -7) for name in ("slots", "page_tables", "seq_lens")}
    got, _ = forward(model.params, None, replace(batch, **spoilt), model.config)
    assert torch.equal(got, want)


def test_the_batch_of_prompts_names_no_pages() -> None:
    batch = Batch.of_prompts([[3, 4, 5], [6]], last_only=True)
    assert {name: getattr(batch, name).tolist() for name in ("input_ids", "positions", "seq_lens", "cu_seqlens", "logit_indices")} == {
        "input_ids": [3, 4, 5, 6], "positions": [0, 1, 2, 0], "seq_lens": [3, 1], "cu_seqlens": [0, 3, 4], "logit_indices": [2, 3],
    }  # fmt: skip
    assert batch.page_tables.shape == (2, 0) and batch.slots.tolist() == [-1] * 4
    assert Batch.of_prompts([[1]]).logit_indices is None


@pytest.mark.parametrize("architecture", SOME)
def test_vmap_over_steering_vectors_is_a_loop(architecture: str) -> None:
    model = random_model(tiny_config(architecture))
    batch = Batch.of_prompts(ROWS)

    def steered(vector: Tensor, each: Tensor) -> tuple[Tensor, Tensor]:
        logits, _, (hidden,) = forward(model.params, None, batch, model.config, add_hidden={0: vector, 1: each}, capture_hidden=(1,))
        return logits, hidden

    vectors, each = torch.randn(3, 32), torch.randn(3, batch.input_ids.shape[0], 32)
    got = vmap(steered)(vectors, each)
    for part, want in zip(got, zip(*map(steered, vectors, each), strict=True), strict=True):
        torch.testing.assert_close(part, torch.stack(want))
    assert (got[0][0] - got[0][1]).abs().max() > 0.1
    torch.testing.assert_close(vmap(steered, in_dims=(0, None))(vectors, each[0])[0][2], steered(vectors[2], each[0])[0])


@pytest.mark.parametrize("architecture", SOME)
def test_vmap_over_tokens_and_embeddings_is_a_loop(architecture: str) -> None:
    model = random_model(tiny_config(architecture))
    batch = Batch.of_prompts(SHORT)
    ids = torch.randint(0, 200, (3, 5), dtype=torch.int32)

    def of_ids(ids: Tensor) -> Tensor:
        return forward(model.params, None, replace(batch, input_ids=ids), model.config)[0]

    def of_embeddings(rows: Tensor) -> Tensor:
        return forward(model.params, None, batch, model.config, inputs_embeds=rows)[0]

    want = torch.stack([of_ids(row) for row in ids])
    torch.testing.assert_close(vmap(of_ids)(ids), want)
    torch.testing.assert_close(vmap(of_embeddings)(model.params.embed[ids]), want)


@pytest.mark.parametrize("architecture", SOME)
def test_the_gradient_of_embeddings_is_that_of_finite_differences_and_of_autograd(architecture: str) -> None:
    model = random_model(tiny_config(architecture, num_heads=2, num_kv_heads=2 if architecture.startswith("GPT") else 1), dtype="float64")
    batch, weights = Batch.of_prompts(SHORT, last_only=True), torch.randn(2, 264, dtype=torch.float64)

    def score(rows: Tensor) -> Tensor:
        logits, _ = forward(model.params, None, batch, model.config, inputs_embeds=rows)
        return (logits.log_softmax(-1) * weights).sum()

    rows = embeddings(model, batch)
    found = grad(score)(rows)
    with torch.enable_grad():
        leaf = rows.clone().requires_grad_()
        score(leaf).backward()
    torch.testing.assert_close(found, leaf.grad)
    for _ in range(4):
        direction, step = torch.randn_like(rows), 1e-5
        slope = (score(rows + step * direction) - score(rows - step * direction)) / (2 * step)
        torch.testing.assert_close((found * direction).sum(), slope, rtol=1e-6, atol=1e-6)


def test_second_derivatives_agree() -> None:
    model = random_model(tiny_config("Gemma2ForCausalLM"), dtype="float64")
    batch = Batch.of_prompts(SHORT, last_only=True)

    def score(vector: Tensor) -> Tensor:
        return forward(model.params, None, batch, model.config, add_hidden={0: vector})[0].logsumexp(-1).sum()

    vector = torch.randn(32, dtype=torch.float64)
    twice = hessian(score)(vector)
    torch.testing.assert_close(twice, twice.T)
    torch.testing.assert_close(twice, jacfwd(grad(score))(vector))


@pytest.mark.parametrize("architecture", SOME)
def test_every_weight_has_a_gradient(architecture: str) -> None:
    model, batch = random_model(tiny_config(architecture)), Batch.of_prompts(ROWS)
    leaves, spec = pytree.tree_flatten(model.params)
    with torch.enable_grad():
        weights = [leaf if leaf is None else leaf.clone().requires_grad_() for leaf in leaves]
        forward(pytree.tree_unflatten(weights, spec), None, batch, model.config)[0].square().sum().backward()
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(model.params)[0]]
    without = {path for path, w in zip(paths, weights, strict=True) if w is not None and (w.grad is None or not w.grad.any())}
    # The experts' bias only chooses. Learned positions leave the rotation out.
    assert without <= {".layers[1].experts.bias", *([".inv_freq"] if model.params.positions is not None else [])}


def test_embeddings_stand_in_the_place_of_the_table() -> None:
    for architecture in SOME:
        model, batch = random_model(tiny_config(architecture)), Batch.of_prompts(ROWS)
        want, _ = forward(model.params, None, batch, model.config)
        other = replace(batch, input_ids=batch.input_ids + 1)
        got, _ = forward(model.params, None, other, model.config, inputs_embeds=embeddings(model, batch))
        assert torch.equal(got, want)


def test_embeddings_and_vectors_of_another_dtype_are_rounded_to_that_of_the_model() -> None:
    model, batch = random_model(tiny_config(), dtype="bfloat16"), Batch.of_prompts(ROWS)
    given: dict[str, Any] = {"inputs_embeds": embeddings(model, batch), "add_hidden": {0: torch.ones(32, dtype=torch.bfloat16)}}
    want, _ = forward(model.params, None, batch, model.config, **given)
    got, _, (hidden,) = forward(
        model.params, None, batch, model.config, inputs_embeds=given["inputs_embeds"].float(), add_hidden={0: torch.ones(32)},
        capture_hidden=[0],
    )  # fmt: skip
    assert torch.equal(got, want) and got.dtype == hidden.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["qwen3: plain", "gemma2: plain", "gemma3: plain", "qwen3_moe: plain", "gpt2: plain"])
def test_hidden_states_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    pair = build(CASES[name], tmp_path)
    ours, (row,) = pair.ours, pair.draw(1, 20)
    theirs = pair.theirs(input_ids=torch.tensor([row]), output_hidden_states=True).hidden_states
    at, paged = prefilled(ours, [row])
    for kv, batch in ((None, Batch.of_prompts([row])), (at.kv, paged)):
        _, _, (last, first, second) = forward(ours.params, kv, batch, ours.config, capture_hidden=(2, 0, 1))
        torch.testing.assert_close(first, theirs[1][0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(second, theirs[2][0], rtol=1e-4, atol=1e-4)
        bias, gain, eps = ours.params.final_norm_bias, ours.params.final_norm, ours.config.rms_norm_eps
        normed = rms_norm(last, gain, eps) if bias is None else torch.nn.functional.layer_norm(last, gain.shape, gain, bias, eps)
        torch.testing.assert_close(normed, theirs[3][0], rtol=1e-4, atol=1e-4)  # transformers' last one is normed


def test_a_vector_is_in_the_state_that_is_returned() -> None:
    model, vector = random_model(tiny_config(num_layers=3)), torch.randn(32)
    batch = Batch.of_prompts(ROWS)
    plain, _, before = forward(model.params, None, batch, model.config, capture_hidden=(0, 1, 1))
    steered, _, after = forward(model.params, None, batch, model.config, add_hidden={1: vector}, capture_hidden=(0, 1, 1))
    assert torch.equal(after[0], before[0]) and after[1] is after[2]
    torch.testing.assert_close(after[1], before[1] + vector)
    assert (steered - plain).abs().max() > 0.1
    same, _, none = forward(model.params, None, batch, model.config, add_hidden={}, capture_hidden=())
    assert torch.equal(same, plain) and none == ()


@pytest.mark.skipif(library(cpu.SOURCE, cpu.SYMBOLS) is None, reason="no C compiler")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_c_path_returns_and_adds_what_the_plain_path_does(dtype: str) -> None:
    model = random_model(tiny_config("MistralForCausalLM", num_layers=2), dtype=dtype)
    kv, batch = decoding(model)
    assert cpu.serves(model.params, kv, batch, model.config)
    tolerance: dict[str, float] = {"rtol": 0.05, "atol": 0.1} if dtype == "bfloat16" else {"rtol": 1e-4, "atol": 1e-5}
    vectors = {0: torch.randn(32).to(model.dtype), 1: torch.randn(3, 32).to(model.dtype)}
    for added in (None, vectors):
        given: dict[str, Any] = {"add_hidden": added, "inputs_embeds": embeddings(model, batch), "capture_hidden": (1, 0)}
        want, _, plain = model.spec.forward(model.params, pytree.tree_map(torch.clone, kv), batch, model.config, **given)
        for choice in (None, FastChoice(layers=(True, False)), FastChoice(layers=(False, True), head=False)):
            got, same, hidden = forward(model.params, kv, batch, model.config, fast=choice, **given)
            assert same is kv
            torch.testing.assert_close(got, want, **tolerance)
            torch.testing.assert_close(hidden, plain, **tolerance)


def test_vectors_are_added_over_pages_too() -> None:
    """A context that is prefilled and decoded with a vector gives the logits of the whole run with it."""
    model, given = random_model(tiny_config("Gemma2ForCausalLM")), {"add_hidden": {0: torch.randn(32)}, "capture_hidden": (0, 1)}
    want, _, hidden = forward(model.params, None, Batch.of_prompts(ROWS), model.config, **given)
    at, batch = prefilled(model)
    got, _, paged = forward(model.params, at.kv, batch, model.config, **given)
    torch.testing.assert_close((got, *paged), (want, *hidden))
    at = layout(model, [12], 4)
    for place, token in enumerate(ROWS[0]):
        step = step_batch(at, [(0, [token], place)], model.device, decode=True)
        got, _, one = forward(model.params, at.kv, step, model.config, **given)
        torch.testing.assert_close((got[0], *(each[0] for each in one)), (want[place], *(each[place] for each in hidden)))


@pytest.mark.parametrize("chosen", [None, (True, True, True), (False, True, False), (True, True, False)])
@pytest.mark.parametrize("wanted", [None, (2, 6), ()])
@pytest.mark.parametrize("few", [True, False])
def test_fused_steps_return_hidden_states(
    few: bool, wanted: tuple[int, ...] | None, chosen: tuple[bool, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU the fused ops are plain functions. Logits stay those of a step that returns none."""
    model = random_model(tiny_config(num_layers=3))
    monkeypatch.setattr(fused, "follows_closely", lambda *_: few)
    monkeypatch.setattr(compiled, "compiled_layer", lambda model: model.spec.layer)
    at, batch = prefilled(model, [[3, 5, 7], [2, 9, 4, 8]])
    batch = replace(batch, logit_indices=None if wanted is None else torch.tensor(wanted, dtype=torch.int32))
    steps = compiled.fused_forward(model, None if chosen is None else FastChoice(layers=chosen))
    without, _ = steps(model.params, at.kv, batch, model.config)
    want, _, plain = model.spec.forward(model.params, at.kv, batch, model.config, capture_hidden=(0, 1, 2))
    torch.testing.assert_close(without, want)
    run: Callable[..., Any] = fused.forward
    if chosen is not None:
        run = lambda *given, **more: fused.forward(*given, plain=model.spec.layer, choice=FastChoice(layers=chosen), **more)  # noqa: E731
    for asked in ((), (1,), (0,), (2,), (2, 0, 2)):
        got, kv, hidden = run(model.params, at.kv, batch, model.config, capture_hidden=asked)
        assert kv is at.kv
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(hidden, tuple(plain[layer] for layer in asked))


def test_fused_steps_refuse_layers_that_the_model_lacks() -> None:
    model = random_model(tiny_config())
    at, batch = prefilled(model)
    with pytest.raises(InvalidRequestError, match=r"capture_hidden has the layer 2, but layers are integers from 0 to 1"):
        fused.forward(model.params, at.kv, batch, model.config, capture_hidden=(2,))


class Ran(TorchDispatchMode):
    """The names of all ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def ops_of(run: Callable[[], Any]) -> list[str]:
    with Ran() as ran:
        run()
    return ran.names


@pytest.mark.parametrize("architecture", SOME)
def test_hidden_states_cost_no_op(architecture: str) -> None:
    """The ops of a step are those of its parts, in order, whether hidden states are returned or not. A vector costs one."""
    model = random_model(tiny_config(architecture))
    at, batch = prefilled(model)
    params, config = model.params, model.config

    def parts() -> None:
        x = layers.embed(params, batch, config)
        for w, (pool, index), given in zip(params.layers, config.places, layers.given_each(params, batch, config), strict=True):
            x = model.spec.layer(w, x, at.kv.pools[pool], index, *given, config)
        decoder.logits(model.spec.head, x, params, config)

    names = ops_of(parts)
    assert names == ops_of(lambda: forward(params, at.kv, batch, config))
    assert names == ops_of(lambda: forward(params, at.kv, batch, config, capture_hidden=(1, 0)))
    steered = ops_of(lambda: forward(params, at.kv, batch, config, add_hidden={1: torch.ones(32)}))
    assert len(steered) == len(names) + 2 and "aten.add.Tensor" in steered  # the other is `ones`


def test_without_kv_no_custom_op_runs() -> None:
    for architecture in SOME:
        model = random_model(tiny_config(architecture))
        names = ops_of(lambda model=model: forward(model.params, None, Batch.of_prompts(ROWS), model.config))
        assert names and not [name for name in names if "nanovllm" in name]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"capture_hidden": (0, -1)}, "capture_hidden has the layer -1, but layers are integers from 0 to 1"),
        ({"capture_hidden": (2,)}, "capture_hidden has the layer 2, but layers are integers from 0 to 1"),
        ({"capture_hidden": (True,)}, "capture_hidden has the layer True, but"),
        ({"capture_hidden": (0.0,)}, "capture_hidden has the layer 0.0, but"),
        ({"capture_hidden": "0"}, "capture_hidden has the layer '0', but"),
        ({"add_hidden": {-1: torch.ones(32)}}, "add_hidden has the layer -1, but layers are integers from 0 to 1"),
        ({"add_hidden": {5: torch.ones(32)}}, "add_hidden has the layer 5, but"),
        ({"add_hidden": {1: torch.ones(31)}}, r"add_hidden\[1\] has the shape \[31\], but this batch needs \[32\] or \[25, 32\]"),
        ({"add_hidden": {1: torch.ones(1, 32)}}, r"add_hidden\[1\] has the shape \[1, 32\], but"),
        ({"add_hidden": {1: torch.tensor(1.0)}}, r"add_hidden\[1\] has the shape \[\], but"),
        ({"inputs_embeds": torch.ones(24, 32)}, r"inputs_embeds has the shape \[24, 32\], but this batch needs \[25, 32\]"),
        ({"inputs_embeds": torch.ones(25, 16)}, r"inputs_embeds has the shape \[25, 16\], but this batch needs \[25, 32\]"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(given: dict[str, Any], message: str, untyped: None) -> None:
    model = random_model(tiny_config())
    at, batch = prefilled(model)
    for kv in (None, at.kv):
        for run in (forward, model.spec.forward):
            with pytest.raises(InvalidRequestError, match=message):
                run(model.params, kv, batch, model.config, **given)
    assert not at.kv.pools[0].any()


def test_integers_of_numpy_name_layers(untyped: None) -> None:
    model, batch = random_model(tiny_config()), Batch.of_prompts(SHORT)
    _, _, hidden = forward(model.params, None, batch, model.config, capture_hidden=torch.tensor([1, 0]).numpy())
    assert [each.shape for each in hidden] == [(5, 32)] * 2


def test_a_decode_batch_needs_kv() -> None:
    model = random_model(tiny_config())
    _, batch = decoding(model)
    with pytest.raises(InvalidRequestError, match="kv=None needs a batch of whole prompts, but cu_seqlens=None is a decode batch"):
        forward(model.params, None, batch, model.config)


def test_a_batch_without_pages_needs_none() -> None:
    model = random_model(tiny_config())
    at, _ = prefilled(model)
    with pytest.raises(InvalidRequestError, match=r"the page tables have no columns, as those of Batch\.of_prompts: pass kv=None"):
        forward(model.params, at.kv, Batch.of_prompts(ROWS), model.config)
    assert not at.kv.pools[0].any()


@pytest.mark.parametrize("prompts", [[], [[]], [[1], []]])
def test_prompts_without_tokens_are_refused(prompts: list[list[int]]) -> None:
    with pytest.raises(InvalidRequestError, match=r"prompts of \[.*\] tokens: there must be at least one prompt"):
        Batch.of_prompts(prompts)


def test_gradients_over_pages_are_refused() -> None:
    """Attention over pages is no function of autograd: the gradient would silently lack its part."""
    model = random_model(tiny_config())
    at, batch = prefilled(model)

    def score(rows: Tensor) -> Tensor:
        return forward(model.params, at.kv, batch, model.config, inputs_embeds=rows)[0].sum()

    with pytest.raises(InvalidRequestError, match="inputs_embeds requires a gradient, which attention over pages does not compute"):
        grad(score)(embeddings(model, batch))
    vector = torch.ones(32, requires_grad=True)
    with torch.enable_grad(), pytest.raises(InvalidRequestError, match=r"add_hidden\[1\] requires a gradient.*: pass kv=None"):
        forward(model.params, at.kv, batch, model.config, add_hidden={1: vector})
    forward(model.params, at.kv, batch, model.config, add_hidden={1: vector})  # no gradient is recorded here


@pytest.mark.filterwarnings("ignore:.*runs through transformers")
def test_a_model_of_the_fallback_refuses_by_name(tmp_path: Path) -> None:
    save(tmp_path, "stablelm", GROUPED)
    model = nv.load_model(tmp_path, device="cpu")
    at, batch = prefilled(model)
    for run in (forward, model.spec.forward):
        with pytest.raises(
            InvalidRequestError, match="kv=None needs a built-in architecture, and this model runs through the transformers"
        ):
            run(model.params, None, batch, model.config)
        for name, value in {"inputs_embeds": torch.ones(25, 32), "add_hidden": {}, "capture_hidden": (0,)}.items():
            with pytest.raises(InvalidRequestError, match=f"{name} needs a built-in architecture"):
                run(model.params, at.kv, batch, model.config, **{name: value})
        logits, kv = run(model.params, at.kv, batch, model.config)
        assert logits.shape == (25, 264) and kv is at.kv


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.compile
@pytest.mark.parametrize("architecture", ["Gemma2ForCausalLM", "GPT2LMHeadModel"])
def test_one_graph_holds_the_forward_pass(architecture: str) -> None:
    model, batch = random_model(tiny_config(architecture)), Batch.of_prompts(SHORT, last_only=True)
    rows, vector = embeddings(model, batch), torch.randn(32)

    def states(params: Any, rows: Tensor, vector: Tensor) -> Any:
        return forward(params, None, batch, model.config, inputs_embeds=rows, add_hidden={0: vector}, capture_hidden=(1, 0))

    torch.testing.assert_close(traced(states)(model.params, rows, vector), states(model.params, rows, vector))


@pytest.mark.compile
def test_one_graph_holds_the_transforms() -> None:
    """With experts, which have most of the functions that differ from those over pages."""
    model, batch = random_model(tiny_config("Ernie4_5_MoeForCausalLM")), Batch.of_prompts(SHORT, last_only=True)
    rows, vectors, config = embeddings(model, batch), torch.randn(3, 32), model.config

    def steered(params: Any, vectors: Tensor) -> Tensor:
        return vmap(lambda vector: forward(params, None, batch, config, add_hidden={1: vector})[0])(vectors)

    def saliency(params: Any, rows: Tensor) -> Tensor:
        return grad(lambda rows: forward(params, None, batch, config, inputs_embeds=rows)[0].logsumexp(-1).sum())(rows)

    torch.testing.assert_close(traced(steered)(model.params, vectors), steered(model.params, vectors))
    torch.testing.assert_close(traced(saliency)(model.params, rows), saliency(model.params, rows))


@pytest.mark.compile
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Gemma2ForCausalLM"])
def test_a_traced_step_returns_hidden_states(architecture: str) -> None:
    """A decode step over pages, of a model with one KV pool and of one with two."""
    model = random_model(tiny_config(architecture))
    kv, batch = decoding(model)

    def step(params: Any, kv: nv.KVState, batch: Batch) -> Any:
        return forward(params, kv, batch, model.config, capture_hidden=(1,))

    want, _, plain = model.spec.forward(model.params, kv, batch, model.config, capture_hidden=(1,))
    got, _, hidden = traced(step)(model.params, kv, batch)
    torch.testing.assert_close((got, *hidden), (want, *plain))
