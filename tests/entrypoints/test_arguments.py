"""Options of the command line: each reaches `load_model` or `init_state` with its value."""

import argparse
from pathlib import Path

import pytest

from nanovllm.entrypoints.arguments import as_typed, engine_limits, rounding, source
from nanovllm.entrypoints.cli import main as cli
from nanovllm.entrypoints.cli.load import load
from nanovllm.errors import InvalidRequestError
from nanovllm.ops.linear.quantised import QuantisedMatrix


def parsed(given: str = "") -> argparse.Namespace:
    return cli.build_parser(with_bench=False).parse_args(["generate", *given.split(), "x"])


def test_every_option_of_the_engine_arrives() -> None:
    usual = {"num_pages": None, "num_frames": None, "max_model_len": None, "memory_fraction": 0.9, "tuning": None, "compile": None}
    usual |= {"max_step_ms": None, "kv_dtype": None, "host_kv_gib": 0.0, "kv_dir": None, "kv_dir_gib": 16.0}
    assert engine_limits(parsed()) == usual
    for given, changed in (
        ("--num-pages 5", {"num_pages": 5}),
        ("--num-frames 6", {"num_frames": 6}),
        ("--max-model-len 7", {"max_model_len": 7}),
        ("--memory-fraction 0.5", {"memory_fraction": 0.5}),
        ("--tuning own.json", {"tuning": Path("own.json")}),
        ("--max-step-ms 12.5", {"max_step_ms": 12.5}),
        ("--tuning off", {"tuning": False}),
        ("--kv-dtype fp8", {"kv_dtype": "fp8"}),
        ("--host-kv-gib 1.5", {"host_kv_gib": 1.5}),
        ("--host-kv-gib auto", {"host_kv_gib": "auto"}),
        ("--host-kv-gib 1 --kv-dir kv --kv-dir-gib 2", {"host_kv_gib": 1.0, "kv_dir": Path("kv"), "kv_dir_gib": 2.0}),
        ("--eager", {"compile": False}),
    ):
        assert engine_limits(parsed(given)) == {**usual, **changed}


def test_every_option_of_the_source_arrives() -> None:
    usual = {"revision": None, "download": False, "trust_remote_code": False}
    assert source(parsed()) == usual
    for given, changed in (
        ("--revision abc", {"revision": "abc"}),
        ("--download", {"download": True}),
        ("--trust-remote-code", {"trust_remote_code": True}),
    ):
        assert source(parsed(given)) == {**usual, **changed}


def test_the_options_for_rounding_arrive_at_the_model() -> None:
    assert rounding(parsed()) == {"quantization": None, "quantize_head": False, "fp8_activations": False}
    assert load(parsed("--device cpu")).quantization == ""
    options = parsed("--device cpu --quantization int4 --quantize-head")
    assert rounding(options) == {"quantization": "int4", "quantize_head": True, "fp8_activations": False}
    model = load(options)
    assert isinstance(model.params.head, QuantisedMatrix) and model.params.head.kind == "int4"
    assert model.quantization == "int4 in groups of 128, rounded while loading, the head too"


def test_another_kind_of_rounding_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parsed("--quantization int2")
    assert "invalid choice: 'int2'" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        parsed("--quantization w4a16")
    assert "argument --quantization: w4a16 is called int4 here: give int4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("host_kv_gib=-1.0 must be at least 0", "--host-kv-gib -1.0 must be at least 0"),
        ("kv_dir='a b' needs host memory: set host_kv_gib too", "--kv-dir a b needs host memory: set --host-kv-gib too"),
        ("quantize_head=True needs quantization='fp8', 'int8' or 'int4'", "--quantize-head needs --quantization fp8, int8 or int4"),
        ("load it with quantization='fp8': now", "load it with --quantization fp8: now"),
        (
            "/data/kv_dir/x and 'num_pages' and config.json's max_num_seqs_x",
            "/data/kv_dir/x and 'num_pages' and config.json's max_num_seqs_x",
        ),
        ("its quantization_config says so: quantization", "its quantization_config says so: quantization"),
        ("set --kv-dir, not tensor_parallel_size", "set --kv-dir, not --tensor-parallel-size"),
    ],
)
def test_messages_have_the_options_as_they_are_typed(message: str, shown: str) -> None:
    assert as_typed(message, parsed()) == shown
    assert as_typed(message, argparse.Namespace()) == message, "a command without these options"


def test_the_head_alone_is_not_rounded() -> None:
    with pytest.raises(
        InvalidRequestError,
        match=r"^--quantize-head needs --quantization fp8, int8 or int4; in a checkpoint that is quantised already, the head ",
    ):
        rounding(parsed("--quantize-head"))


def test_a_limit_without_a_folder_is_refused() -> None:
    for given in ("--kv-dir-gib 16", "--host-kv-gib 1 --kv-dir-gib 0.5"):
        with pytest.raises(InvalidRequestError, match=r"^--kv-dir-gib [\d.]+ limits the pages in a folder: set --kv-dir too$"):
            engine_limits(parsed(given))


def test_an_empty_name_is_no_folder(capsys: pytest.CaptureFixture[str]) -> None:
    for command, option in (("generate", "--kv-dir"), ("serve", "--kv-dir"), ("serve", "--chunk-dir")):
        with pytest.raises(SystemExit, match="2"):
            cli.build_parser(with_bench=False).parse_args([command, "--host-kv-gib", "1", option, ""])
        assert f"argument {option}: '' must be the name of a folder" in capsys.readouterr().err
