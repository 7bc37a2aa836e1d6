"""`kv_dtype` as an option of the shells and of the commands."""

import argparse
import asyncio

import pytest
import torch

import nanovllm as nv
from nanovllm.entrypoints.arguments import add_model_options, engine_limits
from nanovllm.entrypoints.cli.main import main
from nanovllm.testing.models import random_model, tiny_config

GREEDY = nv.SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def test_the_shells_pass_it_on() -> None:
    model = random_model(tiny_config())
    llm = nv.LLM(model, num_pages=16, kv_dtype="fp8")
    assert llm.state.kv.pools[0].dtype == torch.float8_e4m3fn
    (want,) = llm.generate([[1, 2, 3]], GREEDY)

    async def reply() -> list[int]:
        async with nv.AsyncLLM(model, num_pages=16, kv_dtype="fp8") as other:
            (out,) = await other.generate([[1, 2, 3]], GREEDY)
            return out.token_ids

    assert asyncio.run(reply()) == want.token_ids


def test_the_commands_pass_it_on(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_model_options(parser)
    assert engine_limits(parser.parse_args([]))["kv_dtype"] is None
    assert engine_limits(parser.parse_args(["--kv-dtype", "fp8"]))["kv_dtype"] == "fp8"
    flags = ["--device", "cpu", "--num-pages", "16", "--kv-dtype"]
    assert main(["generate", "Hello", *flags, "fp8", "--temperature", "0", "--max-tokens", "4"]) == 0
    assert main(["memory", "Hello", *flags, "fp8", "--max-tokens", "4"]) == 0
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "Hello", *flags, "fp9"])
    assert "--kv-dtype" in capsys.readouterr().err
