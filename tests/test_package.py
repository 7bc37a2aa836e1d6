"""The package as it is installed: its public names, and what importing it needs."""

import subprocess
import sys

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

import nanovllm as nv


def test_public_names_exist_once() -> None:
    assert len(set(nv.__all__)) == len(nv.__all__)
    assert all(hasattr(nv, name) for name in nv.__all__)


def test_what_public_calls_return_has_a_public_name() -> None:
    llm = nv.LLM("tiny", num_pages=64, device="cpu")
    params = nv.SamplingParams(temperature=0, max_tokens=2, logprobs=1)
    *_, piece = llm.stream("Once", params)
    assert isinstance(piece, nv.Piece) and piece.output is not None and piece.output.logprobs is not None
    for value in (piece, piece.output, piece.output.metrics, piece.output.logprobs[0]):
        assert getattr(nv, type(value).__name__) is type(value) and type(value).__name__ in nv.__all__


def test_what_a_report_holds_has_a_public_name() -> None:
    model = nv.load_model("tiny", device="cpu")
    state, _ = nv.prefill(model, nv.init_state(model, num_pages=4), "Once")
    report = nv.memory(state)
    for value in (report, report.owners[0], report.runs[0]):
        assert getattr(nv, type(value).__name__) is type(value) and type(value).__name__ in nv.__all__


def test_import_needs_no_test_tools() -> None:
    hide = "import sys; sys.modules.update(dict.fromkeys(['hypothesis', 'pytest', 'matplotlib']))"
    subprocess.run(
        [sys.executable, "-c", f"{hide}; import nanovllm, nanovllm.entrypoints.cli.main, nanovllm.entrypoints.cli.bench"], check=True
    )


def test_test_tools_that_are_missing_are_named_with_their_extra() -> None:
    program = "import sys; sys.modules['hypothesis'] = None; import nanovllm.testing"
    ended = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert ended.stderr.endswith("ModuleNotFoundError: nanovllm.testing needs hypothesis: pip install 'nanovllm[testing]'\n")


def test_what_a_prompt_shows_fits_on_a_line(untyped) -> None:
    model = nv.load_model("tiny", device="cpu")
    state = old = nv.init_state(model, num_pages=64)
    state, chunk = nv.prefill(model, state, "Once upon a time")
    state, carry = nv.begin(model, state, [chunk, "One day,"], nv.SamplingParams(temperature=1, logprobs=1), room=4)
    after, out = nv.decode_step(model.params, carry, model.config)
    llm = nv.LLM(model, num_pages=8)
    values = (model, model.params, model.params.layers[0], state, old, state.kv, state.pages, state.prefix, state.pool)
    values += (carry, carry.log, carry.batch, carry.sampling, after, out, llm, model.spec.param_table(model.config))
    for value in values:
        assert type(value).__name__ in repr(value) and len(repr(value)) < 400 and "\n" not in repr(value)
    assert repr(state) == "EngineState(3 of 64 pages used, 1 chunk, 2 requests, epoch 2)"
    assert repr(old) == "EngineState(0 of 64 pages used, 0 chunks, 0 requests, epoch 0, donated)"
    assert repr(model) == "Model('tiny', Qwen3ForCausalLM, 5,772,544 parameters, float32 on cpu)"
    assert repr(out).startswith("DecodeOutput(token_ids=int32[2] on cpu, logprobs=float32[2] on cpu, ")
    mapped = [pytree.tree_map(change, value) for value in values[:12] for change in (lambda _: None, lambda _: 0, lambda _: values)]
    assert all(len(repr(value)) < 6000 for value in mapped)


def test_a_shape_without_numbers_can_be_shown() -> None:
    params = nv.load_model("tiny", device="cpu").params
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        assert repr(pytree.tree_map_only(torch.Tensor, mode.from_tensor, params)) == "Params(8 layers, symbolic shapes, float32 on cpu)"
