"""KV on disk with a GPU: pages that threads read into pinned memory and write from it, while copies of the GPU go on."""

import gc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import nanovllm as nv
from nanovllm.executor.executor import runtime_of
from nanovllm.ops.kv_cache.fp8 import as_bytes
from nanovllm.state.prefix_keys import keys_of
from tests.gpu import test_host_windows_gpu as windowed
from tests.gpu.small import random_prompts, require_same, small_model
from tests.gpu.test_host_tier_gpu import ALWAYS, GREEDY, LIMITS

pytestmark = pytest.mark.gpu


def made(model: nv.Model, folder: Path, **limits) -> nv.LLM:
    """An engine that reads whatever it finds in a folder."""
    llm = nv.LLM(model, **limits, host_kv_gib=0.05, kv_dir=folder, kv_dir_gib=2)
    host = llm.state.pool.host
    assert host is not None
    llm.state = replace(llm.state, pool=replace(llm.state.pool, host=replace(host, rates=ALWAYS)))
    return llm


def images(llm: nv.LLM) -> dict[bytes, torch.Tensor]:
    """The bits of all indexed pages by key."""
    pages, pool = llm.state.prefix.pages(), as_bytes(llm.state.kv.pools[0])
    keys = keys_of(llm.state.prefix, np.array(pages, np.int32))
    return {key: pool[:, page].cpu().view(torch.uint8) for key, page in zip(keys, pages, strict=True)}


@pytest.mark.parametrize("kv_dtype", [None, "fp8"])
def test_a_later_engine_has_the_bits_and_the_replies_of_an_earlier_one(tmp_path: Path, kv_dtype: str | None) -> None:
    model, limits = small_model(), {**LIMITS, "kv_dtype": kv_dtype}
    prompts = random_prompts(model, 300, 310, 290, 305, 200)
    first, wanted, bits = made(model, tmp_path, **limits), [], {}
    for prompt in prompts:
        wanted.append(first.generate([prompt], GREEDY)[0].token_ids)
        bits = images(first) | bits
    first.close()
    disk = runtime_of(first.state).disk
    assert disk is not None and disk.counts.pages_written > 50 and disk.counts.errors == 0
    del first, disk
    gc.collect()
    second, compared = made(model, tmp_path, **limits), 0
    for prompt, want in [*zip(prompts, wanted, strict=True)] * 2:
        (output,) = second.generate([prompt], GREEDY)
        assert output.num_cached_tokens == (len(prompt) - 1) // 16 * 16
        require_same(model, prompt, output.token_ids, want, limits)
        nv.check(second.state)
        for key, page in images(second).items():
            if key in bits and not torch.equal(page, bits[key]):
                tokens = len(prompt) // 16 * 16  # a page that the reply has filled was computed again
                assert tokens < len(prompt) + len(output.token_ids)
            else:
                compared += 1
    disk = runtime_of(second.state).disk
    assert disk is not None and disk.counts.pages_read > 50 and compared > 150
    assert disk.counts.pages_damaged == disk.counts.errors == 0


def test_threads_read_and_write_while_requests_run(tmp_path: Path) -> None:
    """Many short engines' lives over one folder, with a pool that is too small: every page that is read is whole."""
    model, prompts = small_model(), random_prompts(small_model(), *range(150, 450, 20))
    plain = nv.LLM(model, **{**LIMITS, "num_pages": 900})
    wanted = [output.token_ids for output in plain.generate(prompts, GREEDY)]
    for _ in range(3):
        llm = made(model, tmp_path, **{**LIMITS, "num_pages": 96})
        for output, prompt, want in zip(llm.generate(prompts, GREEDY), prompts, wanted, strict=True):
            require_same(model, prompt, output.token_ids, want, LIMITS)
        nv.check(llm.state)
        llm.close()
    disk = runtime_of(llm.state).disk
    assert disk is not None and disk.counts.pages_read > 100 and disk.counts.pages_damaged == disk.counts.errors == 0


@pytest.mark.parametrize("kv_dtype", [None, "fp8"])
@pytest.mark.parametrize("windows", [(0, 48, 48, 32), (48, 32, 48, 32)])
def test_a_later_engine_reads_pages_and_frames(tmp_path: Path, windows: tuple[int, ...], kv_dtype: str | None) -> None:
    """Models with sliding windows: an engine that was just made has the prompts of an earlier one, and gives its replies."""
    model, prompts = windowed.small_model(windows), windowed.prompts(300, 310, 290, 250)
    limits = {**windowed.LIMITS, "num_pages": 120, "num_frames": 100, "kv_dtype": kv_dtype}
    first, wanted = made(model, tmp_path, **limits), list[list[int]]()
    for prompt in prompts:
        wanted.append(first.generate([prompt], windowed.GREEDY)[0].token_ids)
    first.close()
    second = made(model, tmp_path, **limits)
    for prompt, want in zip(prompts, wanted, strict=True):
        (output,) = second.generate([prompt], windowed.GREEDY)
        assert output.num_cached_tokens >= len(prompt) // 2, (output.num_cached_tokens, len(prompt))
        require_same(model, prompt, output.token_ids, want, limits)
        nv.check(second.state)
    disk = runtime_of(second.state).disk
    assert disk is not None and disk.counts.pages_read > 40 and disk.counts.pages_damaged == disk.counts.errors == 0
