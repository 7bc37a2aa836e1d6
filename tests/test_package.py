"""The package as it is installed: its public names, and what importing it needs."""

import subprocess
import sys

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
    subprocess.run([sys.executable, "-c", f"{hide}; import nanovllm, nanovllm.cli, nanovllm.bench"], check=True)
