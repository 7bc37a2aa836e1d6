"""The shell for event loops: the replies of `LLM`, and what ends a request, an iterator, a loop, the engine or the program.

`AsyncMachine` draws the order in which engine and tasks take turns. Here threads run freely, or turn by turn where the
order matters. A test in which somebody waits for ever fails after a minute and says so.
"""

import asyncio
import dataclasses
import gc
import inspect
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Coroutine
from typing import Any

import pytest
import torch

import nanovllm as nv
from nanovllm.entrypoints import async_llm
from nanovllm.entrypoints.calls import Call, deliver
from nanovllm.entrypoints.engine_thread import EngineThread
from nanovllm.state.device_errors import chain
from nanovllm.testing.models import random_model, tiny_config
from tests.entrypoints.async_machine import SteppedAsyncLLM
from tests.entrypoints.counting_executor import CountingExecutor, counted_reply

MODEL = random_model(tiny_config())
MUTE = random_model(tiny_config(vocab_size=50))  # no tokenizer
GREEDY = nv.SamplingParams(temperature=0, max_tokens=12)
LONG = nv.SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)  # no test waits for its end
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
LIMIT = 60  # seconds


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """`asyncio.run`, which fails if somebody waits for ever."""

    async def bounded():
        try:
            async with asyncio.timeout(LIMIT):
                return await main
        except TimeoutError:
            raise AssertionError(f"a task still waits after {LIMIT} s: a wake-up was lost") from None

    return asyncio.run(bounded())


def make(model=MODEL, **options):
    return nv.AsyncLLM(model, **{"num_pages": 256, "page_size": 4, **options})


def counting(**options):
    """An `AsyncLLM` in which every token is the one before it plus one."""
    llm = make(MUTE, **options)
    llm.state.runtime.executor = executor = CountingExecutor()
    return llm, executor


async def until(condition, what):
    """Wait for something that another thread does."""
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen within {LIMIT} s"
        await asyncio.sleep(0.001)


async def idle(llm):
    """Wait until the engine has nothing to run; all pages are then free."""
    await until(lambda: not llm.state.running and not llm.state.waiting, "the end of all requests")
    nv.check(llm.state)
    assert llm.state.pool.num_available == llm.state.config.num_pages
    await until(lambda: not llm._engine._calls, "the last delivery")


async def ended(llm, executor):
    """Wait until the engine has nothing to run. Of what was cancelled it runs a few steps more at most."""
    for _ in range(4):  # an iterator that nothing refers to is closed by a task of its own
        await asyncio.sleep(0)
    steps = executor.num_steps
    await idle(llm)
    assert executor.num_steps < steps + 10


def fails(error=RuntimeError, after=0):
    """What an executor calls before its work: it raises after so many calls, from then on."""
    left = [after]

    def before():
        left[0] -= 1
        if left[0] < 0:
            raise error("planted")

    return before


# Replies


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        nv.SamplingParams(temperature=1, seed=5, max_tokens=12),
        nv.SamplingParams(temperature=0, max_tokens=12, stop=("e", "t"), logprobs=2),
        None,
    ],
    ids=["greedy", "seeded", "stop", "none"],
)
def test_replies_are_those_of_llm(params):
    prompts = ["ab", [1, 2, 3], ("xyz"), "a longer prompt of a few tokens"]
    expected = nv.LLM(MODEL, num_pages=256, page_size=4, seed=3).generate(prompts, params)

    async def main():
        async with make(seed=3) as llm:
            together = await llm.generate(prompts, params)
            apart = []
            async with make(seed=3) as other:
                for prompt in prompts:  # a stream reads each, in the same order, so that unseeded draws agree
                    pieces = [piece async for piece in other.stream(prompt, params)]
                    assert "".join(piece.text for piece in pieces) == pieces[-1].output.text
                    assert [t for piece in pieces for t in piece.token_ids] == pieces[-1].output.token_ids
                    assert all(piece.output is None and piece.finish_reason is None for piece in pieces[:-1])
                    apart.append(pieces[-1].output)
            await idle(llm)
        return together, apart

    for outputs in run(main()):
        for output, other in zip(outputs, expected, strict=True):
            assert (output.token_ids, output.text, output.finish_reason) == (other.token_ids, other.text, other.finish_reason)
            assert output.prompt_token_ids.tolist() == other.prompt_token_ids.tolist()
            assert (output.logprobs is None) == (other.logprobs is None)


def test_a_chat_is_that_of_llm():
    llm = nv.LLM("tiny", device="cpu", num_pages=64)
    expected = llm.chat(MESSAGES, GREEDY, enable_thinking=False)

    async def main():
        async with nv.AsyncLLM(llm.model, num_pages=64) as other:
            assert other.model is llm.model and other.tokenizer is llm.tokenizer
            assert await other.chat_tokens(MESSAGES) == llm.chat_tokens(MESSAGES)
            return await other.chat(MESSAGES, GREEDY, enable_thinking=False)

    assert run(main()).text == expected.text


def test_methods_take_what_those_of_llm_take():
    for name in ("generate", "stream", "chat", "chat_tokens", "score"):
        ours, theirs = (inspect.signature(getattr(shell, name)).parameters for shell in (nv.AsyncLLM, nv.LLM))
        assert list(ours) == list(theirs)
        assert [p.default for p in ours.values()] == [p.default for p in theirs.values()]
    assert make(max_num_seqs=3, seed=9, max_model_len=40).state.config.max_model_len == 40
    with pytest.raises(nv.InvalidRequestError, match="did you mean 'num_pages'"):
        make(num_page=3)
    with pytest.raises(nv.InvalidRequestError, match=r"did you mean 'max_num_waiting'.*model, max_num_waiting, .*num_pages"):
        make(max_num_wating=3)


@pytest.mark.parametrize("wrong", [-1, True, 1.5, "4"])
def test_a_limit_that_is_no_number_is_refused(wrong, untyped):
    with pytest.raises(nv.InvalidRequestError, match="max_num_waiting="):
        make(max_num_waiting=wrong)


@pytest.mark.parametrize("prompt", ["", [1, 999_999], "\ud800", ["a", 3.5], [5] * 2000, "x" * 50_000], ids=range(6))
def test_a_refused_prompt_touches_nobody_else(prompt, untyped):
    with pytest.raises(nv.InvalidRequestError) as expected:
        nv.LLM(MODEL, num_pages=256, page_size=4).generate(["ab", prompt] if prompt != ["a", 3.5] else [prompt], GREEDY)

    async def main():
        async with make() as llm:
            other = asyncio.create_task(llm.generate("ab", GREEDY))
            with pytest.raises(nv.InvalidRequestError) as error:
                await llm.generate(["ab", prompt] if prompt != ["a", 3.5] else [prompt], GREEDY)
            with pytest.raises(nv.InvalidRequestError):
                [piece async for piece in llm.stream(prompt, GREEDY)]
            assert len((await other)[0].token_ids) == 12
            await idle(llm)
            return str(error.value)

    assert run(main()) == str(expected.value)


def test_wrong_options_are_named(untyped):
    async def main():
        async with make() as llm:
            for call in (lambda: llm.generate("a", temperature=1), lambda: llm.stream("a", max_token=1)):
                with pytest.raises(nv.InvalidRequestError, match="SamplingParams"):
                    call()
            with pytest.raises(nv.InvalidRequestError, match="2 prompts and 1 sampling_params"):
                await llm.generate(["a", "b"], [GREEDY])
            with pytest.raises(nv.InvalidRequestError, match="must be SamplingParams or None, not dict"):
                [piece async for piece in llm.stream("a", {"max_tokens": 3})]
            assert await llm.generate([]) == []
            await llm.apply(lambda model, state: state)  # the engine has taken it in
            assert not llm._engine._calls

    run(main())


def test_texts_are_encoded_outside_of_the_engine(monkeypatch):
    """Also with a start token, which comes only at the very beginning."""
    model, one = nv.load_model("tiny", device="cpu"), nv.SamplingParams(temperature=0, max_tokens=1)
    threads, encode = [], type(model.tokenizer).encode

    def noted(self, *args, **options):
        threads.append(threading.current_thread().name)
        return encode(self, *args, **options)

    def short(chunk):
        return ["Hello", ["Hello", " you"], [chunk, " you"]]

    long = "Once upon a time there was a boy."
    llm = nv.LLM(model, num_pages=64)
    llm.state, chunk = nv.prefill(model, llm.state, [1, 2, 3])
    expected = [output.prompt_token_ids.tolist() for output in llm.generate([*short(chunk), long], one)]

    async def main():
        async with nv.AsyncLLM(model, num_pages=64) as llm:
            chunk = await llm.apply(lambda model, state: nv.prefill(model, state, [1, 2, 3]))
            return [*await llm.generate(short(chunk), one), *await llm.generate(long, one)]

    monkeypatch.setattr(type(model.tokenizer), "encode", noted)
    monkeypatch.setattr(async_llm, "SHORT", len(long) - 1)
    assert [output.prompt_token_ids.tolist() for output in run(main())] == expected
    assert set(threads[:-1]) == {"MainThread"} and threads[-1].startswith("asyncio_")


def test_functional_calls_run_between_steps(untyped):
    async def main():
        async with make() as llm:
            reply = asyncio.create_task(llm.generate("ab", nv.SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)))
            chunk = await llm.apply(lambda model, state: nv.prefill(model, state, "a fact"))
            assert (await llm.generate([[chunk, "b"]], GREEDY))[0].prompt_token_ids.tolist()[: len(chunk)] == chunk.token_ids.tolist()
            assert await llm.apply(lambda model, state: nv.release(state, chunk)) is None
            with pytest.raises(nv.ReleasedChunkError):
                await llm.apply(lambda model, state: nv.release(state, chunk))
            with pytest.raises(nv.InvalidRequestError, match="must return the next state"):
                await llm.apply(lambda model, state: 3)
            assert len((await reply)[0].token_ids) == 50
            await idle(llm)

    run(main())


def broken_device(model, state):
    raise state.runtime.lease.kill("planted")


def outside(llm):
    nv.prefill(llm.model, llm.state, [1])
    return llm.generate([2], GREEDY)


@pytest.mark.parametrize(
    ("call", "blame"),
    [
        (lambda model, state: (state, nv.prefill(model, state, [1])), "apply has lost its state.*not the newest"),
        (lambda model, state: (*nv.prefill(model, state, [1]), 3), "apply has lost its state.*a tuple of 3"),
        (lambda model, state: [nv.prefill(model, state, [1]), 1 // 0], "apply has lost its state.*ZeroDivisionError"),
        (broken_device, "the engine is dead: planted"),
        (outside, "a call outside of it has taken its state"),
    ],
    ids=["stale", "three", "raises", "device", "outside"],
)
def test_a_lost_state_ends_the_engine_at_once(call, blame, untyped):
    async def main():
        llm, _ = counting()
        with pytest.raises(nv.EngineDeadError, match=blame):
            await (call(llm) if call is outside else llm.apply(call))
        assert isinstance(llm.refusal, nv.EngineDeadError)
        for later in (llm.generate([1], GREEDY), llm.apply(lambda model, state: state)):
            with pytest.raises(nv.EngineDeadError, match=blame):
                await later
        await llm.close()

    run(main())


def test_a_wrong_result_that_loses_nothing_is_only_refused(untyped):
    async def main():
        async with counting()[0] as llm:
            await llm.apply(lambda model, state: nv.prefill(model, state, [1]))
            for wrong, why in (
                (lambda model, state: nv.init_state(model, num_pages=8), "a state of another engine"),
                (lambda model, state: (state, 1, 2), "not a tuple of 3"),
                (lambda model, state: dataclasses.replace(state, epoch=0), "not the newest"),
            ):
                with pytest.raises(nv.InvalidRequestError, match=why):
                    await llm.apply(wrong)
            assert (await llm.generate([2], GREEDY))[0].token_ids == counted_reply([2], 12, 50)

    run(main())


def test_a_function_that_cancels_a_request_ends_its_call():
    async def main():
        async with make() as llm:
            reply = asyncio.create_task(llm.generate("ab", LONG))
            await until(lambda: llm.state.running, "the first step")
            await llm.apply(lambda model, state: nv.cancel(state, 0))
            with pytest.raises(nv.InvalidRequestError, match="apply cancelled or ended request 0"):
                await reply
            await idle(llm)

    run(main())


def test_a_call_that_lost_one_request_drops_its_others():
    async def main():
        llm = SteppedAsyncLLM(MUTE, num_pages=16)
        reply = asyncio.create_task(llm.generate([[1], [2]], LONG))
        await asyncio.sleep(0)
        llm.turn()
        call = Call(1)
        llm._engine.apply(call, lambda model, state: nv.cancel(state, 0))
        llm.turn()
        with pytest.raises(nv.InvalidRequestError, match="ended request 0"):
            await reply
        llm.turn()
        assert not llm.state.running and not llm._engine._calls

    run(main())


# Cancellation


@pytest.mark.unhooked
def test_a_task_that_is_cancelled_at_any_turn_frees_its_pages_and_touches_nobody_else():
    """Before its request is taken in, at each step, and when its end is already on the way."""

    async def main(turns, spins, streamed):
        llm = SteppedAsyncLLM(MUTE, num_pages=16, page_size=2)

        async def read(prompt):
            return [token async for piece in llm.stream([prompt], six) for token in piece.token_ids]

        six = nv.SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        task = asyncio.create_task(read(7) if streamed else llm.generate([[7], [8]], six))
        other = asyncio.create_task(read(30))
        for _ in range(turns):
            await asyncio.sleep(0)
            llm.turn()
        for _ in range(spins):
            await asyncio.sleep(0)
        task.cancel()
        for _ in range(12):
            await asyncio.sleep(0)
            llm.turn()
        assert await other == counted_reply([30], 6, 50)
        assert task.cancelled() or (turns > 5 and task.done())
        assert not llm.state.running and not llm.state.waiting and not llm._engine._calls
        assert llm.state.pool.num_available == 16

    for streamed in (False, True):
        for turns in range(9):
            for spins in range(3):
                run(main(turns, spins, streamed))


def test_a_timeout_cancels():
    async def main():
        llm, executor = counting()
        async with llm:
            executor.before = lambda: time.sleep(0.002)
            for read in (lambda: llm.generate([[1], [2]], LONG), lambda: anext(llm.stream([3], nv.SamplingParams(max_tokens=400)))):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        while True:
                            await read()
            await ended(llm, executor)

    run(main())


@pytest.mark.parametrize("way", ["break", "aclose", "forgotten", "exception"])
def test_leaving_a_stream_cancels_it(way):
    async def main():
        llm, executor = counting()
        async with llm:
            executor.before = lambda: time.sleep(0.001)
            stream = llm.stream([1], LONG)
            if way == "break":
                async for _ in stream:
                    break
                del stream, _
            elif way == "aclose":
                await anext(stream)
                await stream.aclose()
                with pytest.raises(StopAsyncIteration):
                    await anext(stream)
            elif way == "forgotten":
                await anext(stream)
                del stream
                gc.collect()
            else:
                with pytest.raises(ZeroDivisionError):
                    async for _ in stream:
                        raise ZeroDivisionError
                del stream
            await ended(llm, executor)

    run(main())


def test_a_stream_that_was_never_read_was_never_queued():
    async def main():
        async with make() as llm:
            stream = llm.stream("ab", GREEDY)
            await stream.aclose()
            llm.stream("ab", GREEDY)
            await llm.generate("ab", GREEDY)
            assert (await llm.generate("ab", GREEDY))[0].request_id == 1

    run(main())


# Priorities


def test_lower_priorities_run_first_and_bad_ones_are_refused(untyped):
    async def main():
        llm, order = SteppedAsyncLLM(MUTE, num_pages=64, max_num_seqs=1), []
        params = nv.SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)

        async def one(name, prompt, priority):
            (output,) = await llm.generate([prompt], params, priority=priority)
            order.append(name)
            return output.token_ids

        tasks = [asyncio.create_task(one(*given)) for given in (("low", [1], 5), ("high", [2], -1), ("usual", [3], [0]))]
        bad = asyncio.create_task(llm.generate([[1], [2]], params, priority=[0, None]))
        streamed = asyncio.create_task(anext(llm.stream([4], params, priority="x")))
        await asyncio.sleep(0)
        for _ in range(10):
            llm.turn()
            await asyncio.sleep(0)
        replies = [await task for task in tasks]
        assert order == ["high", "usual", "low"]
        assert replies == [counted_reply([i], 3, 50) for i in (1, 2, 3)]
        with pytest.raises(nv.InvalidRequestError, match="prompt 1: priority=None must be an integer"):
            await bad
        with pytest.raises(nv.InvalidRequestError, match="priority='x' must be an integer"):
            await streamed
        with pytest.raises(nv.InvalidRequestError, match="1 prompts and 2 priorities"):
            await llm.generate([[1]], params, priority=[0, 1])

    run(main())


def test_the_time_of_a_step_is_bounded_on_a_gpu_only():
    async def main():
        async with make() as llm:
            assert llm.state.config.max_prefill_tokens is None
        async with make(max_prefill_tokens=7) as llm:
            assert llm.state.config.max_prefill_tokens == 7
        async with make(max_step_ms=5) as llm:
            assert llm.state.config.max_prefill_tokens >= 256

    run(main())


# Hand-over


def test_a_step_calls_the_loop_once_and_only_for_streams_and_ends():
    async def main():
        llm, loop, calls = SteppedAsyncLLM(MUTE, num_pages=64), asyncio.get_running_loop(), []
        plain = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda function, *args: (calls.append(function), plain(function, *args))[1]
        params = [nv.SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (4, 8, 8)]
        whole = asyncio.create_task(llm.generate([[1], [2], [3]], params))
        await asyncio.sleep(0)
        for turn in range(4):
            llm.turn()
            assert calls == ([] if turn < 3 else [deliver])
        streams = [asyncio.create_task(anext(llm.stream([i], LONG))) for i in range(5)]
        await asyncio.sleep(0)
        for turn in range(4):
            llm.turn()
            assert calls == [deliver] * (turn + 2)
        await asyncio.sleep(0)
        assert [output.token_ids for output in await whole] == [counted_reply([i], n, 50) for i, n in ((1, 4), (2, 8), (3, 8))]
        for i, stream in enumerate(streams):
            assert (await stream).token_ids == counted_reply([i], 4, 50)  # what has piled up is one piece
        del streams, stream
        for _ in range(4):  # an iterator that nothing refers to is closed by a task of its own
            await asyncio.sleep(0)
        llm.turn()
        assert not llm.state.running
        short = asyncio.create_task(anext(llm.stream([9], nv.SamplingParams(max_tokens=1))))
        whole = asyncio.create_task(llm.generate([1], LONG))
        await asyncio.sleep(0)
        calls.clear()
        for _ in range(4):
            llm.turn()
        assert calls == [deliver]  # the end of the short stream
        assert (await short).finish_reason == "length"
        whole.cancel()

    run(main())


def test_a_slow_reader_gets_all_new_text_at_once():
    model = nv.load_model("tiny", device="cpu")
    (expected,) = nv.LLM(model, num_pages=64).generate("Once upon a time", LONG_TEXT := nv.SamplingParams(temperature=0, max_tokens=30))

    async def main():
        async with nv.AsyncLLM(model, num_pages=64) as llm:
            stream = llm.stream("Once upon a time", LONG_TEXT)
            first = await anext(stream)
            await until(lambda: not llm._engine._calls, "the end of the request")
            await asyncio.sleep(0)
            rest = [piece async for piece in stream]
            assert len(rest) == 1
            assert first.text + rest[0].text == expected.text
            assert first.token_ids + rest[0].token_ids == expected.token_ids

    run(main())


def test_the_queue_is_bounded():
    async def main():
        llm = SteppedAsyncLLM(MUTE, num_pages=64, max_num_seqs=2, max_num_waiting=3)
        calls = [asyncio.create_task(llm.generate([[i], [i]], GREEDY)) for i in range(3)]
        await asyncio.sleep(0)  # the third finds places for four taken
        llm.turn()
        await asyncio.sleep(0)
        assert (len(llm.state.running), len(llm.state.waiting)) == (2, 2)
        full = "no room for 2 more besides the 4 that run or wait: this engine takes at most 5"
        for call in (calls.pop(), llm.generate([[1], [2]], GREEDY)):
            with pytest.raises(nv.QueueFullError, match=full):
                await call
        with pytest.raises(nv.InvalidRequestError, match="6 prompts in one call: this engine takes at most 5"):
            await llm.generate([[1]] * 6, GREEDY)
        calls.append(asyncio.create_task(llm.generate([[1]], GREEDY)))
        while not all(call.done() for call in calls):
            await asyncio.sleep(0)
            llm.turn()
        assert [len(await call) for call in calls] == [2, 2, 1]

    run(main())


def test_a_call_without_a_place_encodes_nothing(monkeypatch):
    """Texts on their way through the encoder have a place already, until their task is cancelled."""
    model, going, texts = nv.load_model("tiny", device="cpu"), threading.Event(), []

    def encode(model, contexts):
        texts.extend(contexts)
        assert going.wait(LIMIT)
        return [[1]] * len(contexts)

    def render(*args, **options):
        texts.append("chat")
        assert going.wait(LIMIT)
        return [1]

    async def main():
        llm = SteppedAsyncLLM(model, num_pages=64, max_num_seqs=1, max_num_waiting=2)
        long = "x" * (async_llm.SHORT + 1)
        calls = [asyncio.create_task(call) for call in (llm.generate(long, GREEDY), llm.chat(MESSAGES, GREEDY), llm.generate([5], GREEDY))]
        await asyncio.sleep(0)
        for call in (lambda: llm.generate(long), lambda: llm.chat(MESSAGES), lambda: llm.generate("ab"), lambda: anext(llm.stream("ab"))):
            with pytest.raises(nv.QueueFullError, match="no room for 1 more besides the 3"):
                await call()
        await until(lambda: len(texts) == 2, "the work of the loop's pool")
        calls[0].cancel()
        await asyncio.sleep(0)
        calls[0] = asyncio.create_task(llm.generate([6], GREEDY))
        going.set()
        while not all(call.done() for call in calls):
            await asyncio.sleep(0)
            llm.turn()
        await asyncio.gather(*calls)
        await llm.generate([], GREEDY)
        llm._engine.close()
        llm.turn()
        with pytest.raises(nv.EngineClosedError):
            await llm.chat(MESSAGES)
        assert sorted(texts) == ["chat", long]

    monkeypatch.setattr(async_llm, "_encoded", encode)
    monkeypatch.setattr(async_llm, "render", render)
    run(main())


def test_calls_that_come_from_two_threads_at_once_are_bounded():
    """Both may have found room before the other took its place."""

    async def main():
        llm = SteppedAsyncLLM(MUTE, num_pages=64, max_num_seqs=1, max_num_waiting=0)
        calls = [Call(1), Call(1)]
        for call in calls:
            llm._engine.submit(call, [[1]], [GREEDY], None)
        llm.turn()
        with pytest.raises(nv.QueueFullError):
            await calls[1].news()
        assert len(llm.state.running) == 1

    run(main())


# Failures


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_failed_engine_tells_everybody_and_refuses_later_calls(after):
    async def main():
        llm, executor = counting()
        executor.before = fails(after=after)
        tasks = [asyncio.create_task(llm.generate([i], LONG)) for i in range(3)]
        tasks += [asyncio.create_task(anext(llm.stream([i], LONG))) for i in range(3)]
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, BaseException) or after == 0:
                assert isinstance(result, nv.EngineDeadError)
                assert "RuntimeError: planted" in str(result) and isinstance(result.__cause__, RuntimeError)
        await until(lambda: llm._engine.ended, "the end of the thread")
        assert isinstance(llm.refusal, nv.EngineDeadError)
        for call in (lambda: llm.generate("ab"), lambda: anext(llm.stream([1])), lambda: llm.apply(lambda model, state: state)):
            with pytest.raises(nv.EngineDeadError, match="planted"):
                await call()
        await llm.close()
        await llm.close(drain=True)
        await until(lambda: not llm._engine._thread.is_alive(), "the end of the thread")

    run(main())


def test_what_comes_during_the_last_step_is_told():
    """Between the last look at the inbox and the end of the thread."""

    async def main(error):
        llm = SteppedAsyncLLM(MUTE, num_pages=16)
        first = asyncio.create_task(llm.generate([1], LONG))
        await asyncio.sleep(0)
        late = [Call(1), Call(1), Call(1)]

        def before():
            llm._engine.submit(late[0], [[1]], [LONG], None)
            llm._engine.apply(late[1], lambda model, state: state)
            llm._engine.close(late[2])
            raise error("planted")

        llm.executor.before = before
        llm.turn()
        assert llm._engine.ended
        for call in (*late[:2], first):
            with pytest.raises(nv.EngineDeadError):
                await (call if call is first else call.news())
        await late[2].news()

    run(main(RuntimeError))


def test_a_failed_function_between_logits_and_samples_ends_its_own_requests():
    def broken(logits):
        raise ZeroDivisionError("the caller's")

    async def main():
        async with make() as llm:
            other = asyncio.create_task(llm.generate("ab", GREEDY))
            outputs = await llm.generate(["ab", "cd"], GREEDY, process_logits=broken)
            assert [out.finish_reason for out in outputs] == ["error", "error"]
            assert all(isinstance(out.error, nv.RequestFailedError) and "the caller's" in str(out.error) for out in outputs)
            with pytest.raises(nv.RequestFailedError, match="the caller's"):
                async for _ in llm.stream("ab", GREEDY, process_logits=broken):
                    pass
            assert len((await other)[0].token_ids) == 12
            await idle(llm)

    run(main())


def test_a_prompt_without_pages_ends_alone():
    async def main():
        llm, _ = counting(num_pages=8)
        async with llm:
            chunk = await llm.apply(lambda model, state: nv.prefill(model, state, [1] * 24))
            short, stuck, later = ([2] * 4, [3] * 20, [4] * 4)
            five = nv.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
            results = await asyncio.gather(*(llm.generate(p, five) for p in (short, stuck, later)))
            assert isinstance(results[1][0].error, nv.OutOfPagesError)
            assert [results[i][0].token_ids for i in (0, 2)] == [counted_reply([i], 4, 50) for i in (2, 4)]
            await llm.apply(lambda model, state: nv.release(state, chunk))
            assert len((await llm.generate(stuck, five))[0].token_ids) == 4

    run(main())


def test_a_prompt_that_fails_leaves_the_others_of_its_call():
    async def main():
        llm = SteppedAsyncLLM(MUTE, num_pages=16, max_num_batched_tokens=1)
        call = asyncio.create_task(llm.generate([[1], [2]], nv.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)))
        await asyncio.sleep(0)
        llm.executor.before = fails(torch.OutOfMemoryError)
        llm.turn()
        llm.executor.before = lambda: None
        while llm.state.running or llm.state.waiting:
            llm.turn()
        failed, other = await call
        assert isinstance(failed.error, nv.OutOfPagesError) and other.error is None
        assert other.token_ids == counted_reply([2], 12, MUTE.config.vocab_size)
        assert not llm._engine._calls

    run(main())


# Ends


@pytest.mark.parametrize("drain", [False, True])
def test_closing_ends_or_drains(drain):
    async def main():
        llm, executor = counting()
        closing = threading.Event()
        executor.before = lambda: executor.num_steps < 20 or closing.wait(LIMIT)  # no request ends before
        params = nv.SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        tasks = [asyncio.create_task(llm.generate([[i], [i]], params)) for i in range(3)]
        stream = llm.stream([9], params)
        await anext(stream)
        ends = [asyncio.create_task(llm.close(drain=drain)) for _ in range(2)]
        await asyncio.sleep(0)
        closing.set()
        with pytest.raises(nv.EngineClosedError):
            await llm.generate([1], params)
        await asyncio.gather(*ends)
        for i, result in enumerate(await asyncio.gather(*tasks, return_exceptions=True)):
            if drain:
                assert [output.token_ids for output in result] == [counted_reply([i], 40, 50)] * 2
            else:
                assert isinstance(result, nv.EngineClosedError)
        if drain:
            assert [piece async for piece in stream][-1].output.token_ids == counted_reply([9], 40, 50)
        else:
            with pytest.raises(nv.EngineClosedError):
                [piece async for piece in stream]
        await llm.close()
        await idle_state(llm)

    run(main())


async def idle_state(llm):
    nv.check(llm.state)
    assert not llm.state.running and not llm.state.waiting
    assert llm.state.pool.num_available == llm.state.config.num_pages
    await until(lambda: not llm._engine._thread.is_alive(), "the end of the thread")


def test_a_drain_can_be_cut_short():
    async def main():
        llm, executor = counting()
        executor.before = lambda: time.sleep(0.05)
        task = asyncio.create_task(llm.generate([1], LONG))
        await until(lambda: llm.state.running, "the first step")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await llm.close(drain=True)
        await llm.close()
        with pytest.raises(nv.EngineClosedError):
            await task

    run(main())


def test_one_object_serves_many_loops_and_threads():
    llm, _ = counting(max_num_seqs=8)
    results, fifty = {}, nv.SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)

    async def main(place):
        outputs = await llm.generate([[place], [place + 1]], fifty)
        pieces = [token async for piece in llm.stream([place], GREEDY) for token in piece.token_ids]
        results[place] = [output.token_ids for output in outputs], pieces

    run(main(0))
    threads = [threading.Thread(target=lambda place=place: run(main(place))) for place in (10, 20, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    for place in (0, 10, 20, 30):
        assert results[place] == ([counted_reply([i], 50, 50) for i in (place, place + 1)], counted_reply([place], 12, 50))
    run(llm.close())


def test_a_loop_that_is_gone_takes_its_requests_along(recwarn):
    llm, executor = counting()
    executor.before = lambda: time.sleep(0.001)

    async def read():
        return [piece async for piece in llm.stream([1], LONG)]

    loop = asyncio.new_event_loop()
    task = loop.create_task(read())
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()  # a program that does not clean up
    steps = executor.num_steps
    del task

    async def main():
        assert (await llm.generate([2], GREEDY))[0].token_ids == counted_reply([2], 12, 50)
        await idle(llm)
        await llm.close()

    run(main())
    assert executor.num_steps < steps + 30
    gc.collect()
    recwarn.clear()


def left_loop(task, turns):
    """An event loop that was closed with a task in it, after so many turns."""
    loop = asyncio.new_event_loop()
    left = loop.create_task(task)
    for _ in range(turns):
        loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    left._log_destroy_pending = False


def test_a_closed_loop_whose_request_ends_touches_nobody_else():
    """Its request ends in the very step that finds the loop closed, or runs on and is cancelled."""
    llm = SteppedAsyncLLM(MUTE, num_pages=16)

    async def main():
        other = asyncio.create_task(llm.generate([5], GREEDY))
        for max_tokens in (1, 400):
            for call in (llm.generate([[1], [2]], (one := nv.SamplingParams(max_tokens=max_tokens))), anext(llm.stream([3], one))):
                thread = threading.Thread(target=left_loop, args=(call, 1))
                thread.start()
                thread.join(LIMIT)
        await asyncio.sleep(0)
        llm.turn()
        assert len(llm.state.running) == 1
        assert len(llm._engine._calls) == 1
        while not other.done():
            llm.turn()
            await asyncio.sleep(0)
        assert (await other)[0].token_ids == counted_reply([5], 12, 50)
        assert llm.refusal is None

    run(main())


def test_two_engines_in_one_loop():
    async def main():
        async with make() as first, make(seed=1) as second:
            assert first._engine._thread is not second._engine._thread
            both = await asyncio.gather(first.generate("ab", GREEDY), second.generate("ab", GREEDY))
            assert both[0][0].token_ids == both[1][0].token_ids

    run(main())


def test_an_object_that_is_forgotten_ends_its_thread():
    llm = make()
    thread, engine = llm._engine._thread, weakref.ref(llm._engine)
    assert len(run(llm.generate("ab", GREEDY))) == 1
    del llm
    thread.join(LIMIT)
    assert not thread.is_alive(), "the thread goes on without its object"
    del thread
    gc.collect()
    assert engine() is None, "the engine's memory is kept"


PROGRAM = """
import asyncio, sys
import nanovllm as nv
llm = nv.AsyncLLM("tiny", device="cpu", num_pages=64)
long = nv.SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
async def main():
    task = asyncio.create_task(llm.generate("Once", long))
    async for piece in llm.stream("Once", long):
        print("reading", flush=True)
        {then}
{run}
"""


@pytest.mark.parametrize(
    ("then", "body", "code"),
    [
        ("break", "asyncio.run(main())", 0),
        ("sys.exit(3)", "asyncio.run(main())", 3),
        ("break", "loop = asyncio.new_event_loop()\nloop.run_until_complete(main())", 0),
    ],
    ids=["forgets to close", "exits", "leaves its loop"],
)
@pytest.mark.long
def test_a_program_that_does_not_close_ends(then, body, code):
    program = PROGRAM.format(then=then, run=body)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT, check=False)
    assert ended.returncode == code, ended.stderr
    assert "Error" not in ended.stderr and "Fatal" not in ended.stderr


INTERRUPTED = """
import asyncio, signal
import nanovllm as nv
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it
long = nv.SamplingParams(temperature=0, max_tokens=1900, ignore_eos=True)
async def main():
    async with nv.AsyncLLM("tiny", device="cpu", num_pages=128) as llm:
        try:
            async for piece in llm.stream("Once", long):
                print("reading", flush=True)
        finally:
            globals()["left"] = llm
try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("interrupted", len(left.state.running), flush=True)
"""


@pytest.mark.unhooked  # another process runs without the hook in any case
def test_ctrl_c_ends_asyncio_run():
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "reading\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, err
    assert out.splitlines()[-1] == "interrupted 0" and err == ""


def test_a_refusal_is_a_new_exception_each_time():
    """The same one would collect a traceback at each raise."""
    engine = EngineThread(MUTE, nv.init_state(MUTE, num_pages=8), None)
    engine.close()
    assert not engine.turn()
    errors = []
    for _ in range(2):
        with pytest.raises(nv.EngineClosedError) as error:
            engine.require_room(1)
        errors.append(error.value)
    assert errors[0] is not errors[1]


@pytest.mark.parametrize("way", ["step", "submit", "apply", "lost"])
def test_an_error_keeps_no_engine(way):
    """Neither its own, after its traceback is dropped, nor its causes."""

    def broken(model, state):
        raise ZeroDivisionError

    async def main():
        llm, executor = counting()
        engine = weakref.ref(llm._engine)
        executor.before = fails() if way == "step" else executor.before
        call = {
            "step": lambda: llm.generate([1], GREEDY),
            "submit": lambda: llm.generate([99], GREEDY),
            "apply": lambda: llm.apply(broken),
            "lost": lambda: llm.apply(lambda model, state: [nv.prefill(model, state, [1]), 1 // 0]),
        }[way]
        with pytest.raises(Exception) as info:
            await call()
        error, thread = info.value.with_traceback(None), llm._engine._thread
        await llm.close()
        del info, llm, executor, call
        await until(lambda: not thread.is_alive(), "the end of the thread")
        del thread
        gc.collect()
        return engine, error

    engine, error = run(main())
    assert engine() is None
    assert all(one.__traceback__ is None for one in chain(error))
    assert any("Traceback" in note for one in chain(error) for note in getattr(one, "__notes__", ()))
