"""The shell: forms of prompts, streams, chats, and what is left after faults and interruptions."""

import gc
import inspect
import signal
import sys
from itertools import zip_longest
from threading import Thread
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nanovllm as nv
from nanovllm.chunks.handles import detach
from nanovllm.engine.requests import submit_many
from nanovllm.entrypoints import llm as shell
from nanovllm.entrypoints.display.terminal import bar
from nanovllm.entrypoints.llm import LLM
from nanovllm.state.steady import Steady
from nanovllm.testing.models import random_model, tiny_config
from nanovllm.tokenizer.stream import TextStream, held_back

MODEL = random_model(tiny_config())
MUTE = random_model(tiny_config(vocab_size=50))  # no tokenizer
GREEDY = nv.SamplingParams(temperature=0, max_tokens=12)
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


def make(model=MODEL, **limits):
    return LLM(model, **{"num_pages": 64, "page_size": 4, **limits})


def require_idle(llm):
    nv.check(llm.state)
    assert not llm.state.running
    assert not llm.state.waiting
    assert not llm.inbox
    assert llm.state.pool.num_available == llm.state.config.num_pages


# Prompts


def test_every_form_of_prompt_gives_a_list_in_order():
    llm = make()
    ids = MODEL.tokenizer.encode("ab")
    (text,) = llm.generate("ab", GREEDY)
    assert text.prompt_token_ids.tolist() == ids
    assert len(text.token_ids) == 12
    assert text.finish_reason == "length"
    for prompts in (ids, tuple(ids), np.array(ids), ["ab"], [ids], ("ab",)):
        assert [out.token_ids for out in llm.generate(prompts, GREEDY)] == [text.token_ids]
    mixed = llm.generate(["xyz", ids, np.array(ids), "ab"], GREEDY)
    assert [out.prompt_token_ids.tolist() for out in mixed] == [MODEL.tokenizer.encode("xyz"), ids, ids, ids]
    assert [out.token_ids for out in mixed[1:]] == [text.token_ids] * 3
    assert llm.generate([]) == []
    require_idle(llm)


def test_a_chunk_is_a_prompt():
    llm = make()
    (whole,) = llm.generate("abcdef", GREEDY)
    llm.state, chunk = nv.prefill(llm.model, llm.state, "abcdef")
    (alone,), (first, second) = llm.generate(chunk, GREEDY), llm.generate([chunk, "abcdef"], GREEDY)
    assert alone.token_ids == first.token_ids == second.token_ids == whole.token_ids
    assert alone.num_cached_tokens == 5
    llm.state = nv.release(llm.state, chunk)
    require_idle(llm)


def test_one_sampling_params_each():
    llm = make()
    outs = llm.generate(["ab", "ab"], [GREEDY, nv.SamplingParams(temperature=0, max_tokens=3)])
    assert [len(out.token_ids) for out in outs] == [12, 3]
    assert outs[0].token_ids[:3] == outs[1].token_ids
    with pytest.raises(nv.InvalidRequestError, match="2 prompts and 1 sampling_params"):
        llm.generate(["ab", "ab"], [GREEDY])
    require_idle(llm)


def test_none_takes_the_models_own_options():
    (out,) = make().generate("ab")
    assert len(out.token_ids) == 16  # generation_config is empty: greedy, our default length
    assert out.token_ids[:12] == make().generate("ab", GREEDY)[0].token_ids
    assert [token for piece in make().stream("ab") for token in piece.token_ids] == out.token_ids


def test_every_option_reaches_the_loader_or_the_engine(monkeypatch):
    loads, engines, real = [], [], shell.init_state
    where = {
        "revision": "abc",
        "download": True,
        "trust_remote_code": True,
        "quantization": "int8",
        "quantize_head": True,
        "fp8_activations": True,
    }
    limits = {
        "num_pages": 5, "num_frames": 6, "page_size": 7, "memory_fraction": 0.5, "max_model_len": 8, "max_num_seqs": 9,
        "max_num_batched_tokens": 10, "max_step_ms": 12.5, "max_prefill_tokens": 13, "seed": 11, "compile": False, "cascade": True,
        "check": True, "tuning": "own.json", "kv_dtype": "fp8", "host_kv_gib": 2, "kv_dir": "kv", "kv_dir_gib": 3,
    }  # fmt: skip
    monkeypatch.setattr(shell, "load_model", lambda *given, **more: loads.append((given, more)) or MODEL)
    monkeypatch.setattr(shell, "init_state", lambda model, **given: engines.append(given) or real(model, num_pages=4))
    LLM("some", device="cpu", dtype="bfloat16", **where, **limits)
    assert loads == [(("some", "cpu", "bfloat16"), {**where, "max_model_len": 8})]
    assert engines == [limits]
    for name, value in {"device": "cpu", "dtype": "float32", **where}.items():
        with pytest.raises(nv.InvalidRequestError, match="model is already loaded"):
            LLM(MODEL, **{name: value})


def test_priorities_change_who_runs_first_and_no_reply():
    prompts, order = ["ab", "cd", "ef"], []
    alone = [out.token_ids for out in make().generate(prompts, GREEDY)]
    llm = make(max_num_seqs=1)
    plain = llm._step
    for priority, first in ((0, [0, 1, 2]), ([2, 1, 0], [2, 1, 0]), ((0, 3, -1), [2, 0, 1])):
        order.clear()
        with patch.object(LLM, "_step", lambda self: noted(order, plain())):
            outputs = llm.generate(prompts, GREEDY, priority=priority)
        assert [out.token_ids for out in outputs] == alone
        assert [request_id - outputs[0].request_id for request_id in order] == first
    require_idle(llm)


def noted(order, ended):
    order.extend(ended)
    return ended


def test_streams_of_any_priority_read_their_own_tokens():
    """Running requests are in the order of their ranks, which is not that of their ids."""
    alone = [make().generate(text, GREEDY)[0].text for text in ("ab", "cd", "ef")]
    llm = make()
    streams = [llm.stream(text, GREEDY, priority=priority) for text, priority in (("ab", 1), ("cd", 2), ("ef", -4))]
    texts = ["", "", ""]
    left = dict(enumerate(streams))
    while left:
        for i, stream in [*left.items()]:
            piece = next(stream, None)
            if piece is None:
                del left[i]
            else:
                texts[i] += piece.text
    assert texts == alone
    assert llm.chat(MESSAGES, GREEDY, priority=7).text == make().chat(MESSAGES, GREEDY).text
    require_idle(llm)


def test_bad_priorities_are_refused(untyped):
    llm = make()
    with pytest.raises(nv.InvalidRequestError, match="2 prompts and 3 priorities: pass one for all"):
        llm.generate(["ab", "cd"], GREEDY, priority=[0, 1, 2])
    with pytest.raises(nv.InvalidRequestError, match="prompt 1: priority='high' must be an integer"):
        llm.generate(["ab", "cd"], GREEDY, priority=[0, "high"])
    with pytest.raises(nv.InvalidRequestError, match=r"priority=0\.5 must be an integer"):
        llm.stream("ab", GREEDY, priority=0.5)
    require_idle(llm)


def test_more_prompts_than_the_pool_holds_at_once():
    prompts = [f"prompt {i}" for i in range(9)]
    alone = [make().generate(p, GREEDY)[0].token_ids for p in prompts]
    llm = make(num_pages=7, max_num_seqs=4, max_num_batched_tokens=6)
    assert [out.token_ids for out in llm.generate(prompts, GREEDY)] == alone
    require_idle(llm)


def test_a_model_without_tokenizer_takes_ids_only():
    llm = make(MUTE)
    (out,) = llm.generate([1, 2, 3], GREEDY)
    assert out.text == ""
    assert [t for piece in llm.stream([1, 2, 3], GREEDY) for t in piece.token_ids] == out.token_ids
    for call in (lambda: llm.generate("text"), lambda: llm.chat(MESSAGES), lambda: llm.generate([1], nv.SamplingParams(stop="x"))):
        with pytest.raises(nv.InvalidRequestError, match="tokenizer"):
            call()
    require_idle(llm)


BAD_PROMPTS = ["", [[]], [-1], [264], [1, "a"], [True], [1.5], None, 3, b"ab", {"a": 1}, "\ud800", "x" * 400, np.zeros((2, 2), int), [None]]


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=repr)
@pytest.mark.usefixtures("untyped")
def test_a_refused_prompt_leaves_the_engine_as_it_was(prompt):
    llm = make()
    before = llm.state
    for prompts in (prompt, ["good", prompt, "good"]):
        with pytest.raises(nv.InvalidRequestError):
            llm.generate(prompts, GREEDY)
    with pytest.raises(nv.InvalidRequestError):
        llm.stream(prompt, GREEDY)
    assert llm.state is before
    assert llm.generate("good", GREEDY)[0].token_ids == make().generate("good", GREEDY)[0].token_ids
    require_idle(llm)


@pytest.mark.usefixtures("untyped")
def test_a_refusal_names_the_prompt():
    with pytest.raises(nv.InvalidRequestError, match="prompt 1: token id 264 is outside the vocabulary"):
        make().generate(["good", [264]])
    with pytest.raises(nv.InvalidRequestError, match="SamplingParams or None, not dict"):
        make().generate("good", {"temperature": 0})  # type: ignore[arg-type]
    with pytest.raises(nv.InvalidRequestError, match="stop_token_ids holds the token id 264"):
        make().generate("good", nv.SamplingParams(stop_token_ids=[264]))


def test_unknown_keywords_are_explained():
    llm = make()
    with pytest.raises(nv.InvalidRequestError, match=r"'num_page': did you mean 'num_pages'\? Valid options: model, device"):
        LLM(MODEL, num_page=3)  # type: ignore[call-arg]
    with pytest.raises(nv.InvalidRequestError, match=r"pass SamplingParams\(temperature=0\)"):
        llm.generate("ab", temperature=0)  # type: ignore[call-arg]
    with pytest.raises(nv.InvalidRequestError, match="did you mean 'enable_thinking'"):
        llm.chat(MESSAGES, thinking=False)  # type: ignore[call-arg]
    with pytest.raises(nv.InvalidRequestError, match="did you mean 'sampling_params'"):
        llm.stream("ab", params=GREEDY)  # type: ignore[call-arg]
    with pytest.raises(nv.InvalidRequestError, match=r"the sampling option 'max_tokens'\? Pass SamplingParams\(max_tokens=5\)\."):
        llm.generate("ab", max_token=5)  # type: ignore[call-arg]
    with pytest.raises(nv.InvalidRequestError, match=r"option 'retain'\. Valid options: messages, sampling_params, tools, enable_thinking"):
        llm.chat(MESSAGES, retain="shift")  # type: ignore[call-arg]
    with pytest.raises(nv.InvalidRequestError, match="load_model"):
        LLM(MODEL, device="cpu")


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda state: nv.generate(MODEL, state, "a", temperature=0), r"is a sampling option: pass SamplingParams\(temperature=0\)$"),
        (lambda state: nv.generate_many(MODEL, state, ["a"], retains="all"), "'retains': did you mean 'retain'"),
        (lambda state: nv.submit(MODEL, state, "a", temprature=0), r"'temprature': did you mean the sampling option 'temperature'\?"),
        (lambda state: nv.prefill(MODEL, state, "a", stop="b"), "pass SamplingParams.stop='b'. to a call that samples, such as generate"),
        (lambda state: nv.init_state(MODEL, num_page=8), "'num_page': did you mean 'num_pages'"),
        (lambda state: nv.load_model("tiny", devise="cpu"), "'devise': did you mean 'device'"),
        (lambda state: nv.begin(MODEL, state, ["a"], rooms=1), "'rooms': did you mean 'room'"),
        (
            lambda state: nv.compose(MODEL, state, [], again=1),
            "unknown option 'again'. Valid options: model, state, chunks, recompute, namespace$",
        ),
        (lambda state: nv.drop(MODEL, state, None, 0, 1, how="gap"), "unknown option 'how'"),
        (lambda state: nv.memory(state, name={}), "'name': did you mean 'names'"),
    ],
)
def test_unknown_keywords_of_functions_are_explained(call, told):
    state = nv.init_state(MODEL, num_pages=4)
    with pytest.raises(nv.InvalidRequestError, match=told):
        call(state)
    nv.check(state)


def test_a_stop_text_is_in_the_chunk_and_not_in_the_text():
    assert MODEL.tokenizer is not None
    state, whole = nv.generate(MODEL, nv.init_state(MODEL, num_pages=8), "Hello", GREEDY)
    stop = MODEL.tokenizer.decode(whole.token_ids[3:5])
    state, gen = nv.generate(MODEL, state, "Hello", nv.SamplingParams(temperature=0, max_tokens=12, stop=stop))
    assert gen.finish_reason == "stop" and stop not in gen.text and stop in MODEL.tokenizer.decode(gen.token_ids)
    assert gen.chunk.token_ids.tolist()[-len(gen.token_ids) :] == gen.token_ids


def test_a_checked_function_keeps_its_signature():
    assert list(inspect.signature(nv.generate).parameters) == ["model", "state", "context", "sampling_params", "retain", "process_logits"]
    assert nv.init_state.__name__ == "init_state" and "Create an empty engine" in str(nv.init_state.__doc__)
    with pytest.raises(nv.InvalidRequestError, match="page_size=0"):
        LLM(MODEL, page_size=0)
    with pytest.raises(nv.CheckpointError, match="neither a folder nor a repository"):
        LLM("no-such-model")


def test_two_engines_in_one_process():
    one, two = make(), make(MUTE)
    first = one.generate("ab", GREEDY)[0].token_ids
    stream = one.stream("ab", GREEDY)
    got = list(next(stream).token_ids)
    two.generate([1, 2], GREEDY)
    assert got + [t for piece in stream for t in piece.token_ids] == first
    one.state, chunk = nv.prefill(one.model, one.state, "ab")
    with pytest.raises(nv.ForeignChunkError):
        two.generate(chunk, GREEDY)
    require_idle(two)


# Interruptions


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, MemoryError])
def test_an_exception_in_the_middle_cancels_what_was_queued(monkeypatch, error):
    llm, steps = make(num_pages=12, max_num_seqs=2), []
    expected = make().generate("good", GREEDY)[0].token_ids
    prefill = llm.state.runtime.executor.prefill

    def failing(*args, **options):
        steps.append(None)
        if len(steps) == 3:
            raise error("in the middle")
        return prefill(*args, **options)

    monkeypatch.setattr(llm.state.runtime.executor, "prefill", failing)
    with pytest.raises(error):
        llm.generate(["one", "two", "three", "four", "five"], GREEDY)
    assert len(steps) == 3
    require_idle(llm)
    assert llm.generate("good", GREEDY)[0].token_ids == expected


def test_ctrl_c_takes_effect_after_the_step_and_loses_nothing(monkeypatch):
    llm, real = make(), shell.step

    def interrupted(model, state):
        signal.raise_signal(signal.SIGINT)
        return real(model, state)

    monkeypatch.setattr(shell, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["one", "two"], GREEDY)
    assert llm.state.stats.prefill_tokens == 6
    require_idle(llm)
    stream = llm.stream("one", GREEDY)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    require_idle(llm)
    monkeypatch.undo()
    assert llm.generate("one", GREEDY)[0].token_ids == make().generate("one", GREEDY)[0].token_ids
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# Streams

SOME = {
    "greedy": GREEDY,
    "long": nv.SamplingParams(temperature=0, max_tokens=100),
    "drawn": nv.SamplingParams(temperature=1.5, seed=3, max_tokens=40),
    "one": nv.SamplingParams(temperature=0, max_tokens=1),
    "logprobs": nv.SamplingParams(temperature=0, max_tokens=5, logprobs=2),
}


@pytest.mark.parametrize("params", SOME.values(), ids=SOME.keys())
def test_streamed_equals_generated(params):
    llm = make()
    (out,) = llm.generate("hello", params)
    pieces = list(llm.stream("hello", params))
    assert "".join(piece.text for piece in pieces) == out.text
    assert [t for piece in pieces for t in piece.token_ids] == out.token_ids
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert all(len(piece.token_ids) == 1 for piece in pieces)
    assert pieces[-1].output.text == out.text
    assert pieces[-1].output.num_cached_tokens == 4
    require_idle(llm)


@pytest.mark.unhooked  # its checks look at sequences
def test_a_stream_reads_its_own_tokens_alone(monkeypatch):
    """However many streams are read in turn, the sequences of all rows are built for no token."""
    built = []
    sequences = Steady.sequences
    monkeypatch.setattr(Steady, "sequences", lambda self: built.append(self.age) or sequences(self))
    llm, texts = make(), ["hello", "one", "world"]
    wanted = [out.text for out in llm.generate(texts, SOME["long"])]
    built.clear()
    streams, shown = [llm.stream(text, SOME["long"]) for text in texts], [""] * 3
    for pieces in zip_longest(*streams):
        shown = [text + piece.text if piece else text for text, piece in zip(shown, pieces, strict=True)]
    assert shown == wanted
    assert len(built) < 30  # where pages are taken, not 100 times three


@pytest.mark.unhooked
@settings(max_examples=8)
@given(st.data())
def test_streamed_equals_generated_with_stops(data):
    llm, params = make(), SOME["drawn"]
    (free,) = llm.generate("hello", params)
    begin = data.draw(st.integers(0, len(free.text) - 1))
    stops = [free.text[begin : begin + data.draw(st.integers(1, 6))]]
    stops += data.draw(st.lists(st.text(st.sampled_from(sorted(set(free.text))), min_size=1, max_size=3), max_size=2))
    ids = data.draw(st.lists(st.sampled_from(free.token_ids[5:]), max_size=1))
    params = nv.SamplingParams(temperature=1.5, seed=3, max_tokens=40, stop=stops, stop_token_ids=ids)
    (out,) = llm.generate("hello", params)
    pieces = list(llm.stream("hello", params))
    assert "".join(piece.text for piece in pieces) == out.text
    assert pieces[-1].finish_reason == out.finish_reason
    assert free.text.startswith(out.text) or "\ufffd" in out.text
    assert not any(stop in out.text for stop in stops)
    require_idle(llm)


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_held_back_is_the_longest_beginning_of_a_stop(text, stops):
    kept = [n for n in range(len(text) + 1) if any(s != text[len(text) - n :] and s.startswith(text[len(text) - n :]) for s in stops)]
    assert held_back(text, stops) == max(kept, default=0)


@given(st.text("ab<é🙂", max_size=20), st.lists(st.text("ab<é🙂", min_size=1, max_size=4), max_size=3), st.integers(1, 5))
def test_a_text_stream_never_shows_a_part_of_a_stop(text, stops, size):
    ends = [text.find(stop) for stop in stops if stop in text]
    whole = text[: min(ends)] if ends else text
    ids = MODEL.tokenizer.encode(text)
    stream, shown = TextStream.of(MODEL.tokenizer, stops), ""
    for start in range(0, len(ids), size):
        seen = MODEL.tokenizer.decode(ids[: start + size]).rstrip("\ufffd")
        if any(stop in seen for stop in stops):
            break
        stream, piece = stream.push(ids[start : start + size])
        shown += piece
        assert whole.startswith(shown)
    assert shown + stream.end(whole) == whole


def test_texts_of_a_stream_are_one_prompt_in_parts():
    llm = make()
    (output,) = llm.generate([["hello ", "world"]], GREEDY)
    assert "".join(piece.text for piece in llm.stream(["hello ", "world"], GREEDY)) == output.text


def test_leaving_the_block_closes_and_a_closed_llm_takes_no_requests():
    with make() as llm:
        stream = llm.stream("hello", GREEDY)
        next(stream)
    calls = [
        lambda: llm.generate("hello", GREEDY),
        lambda: llm.stream("hello", GREEDY),
        lambda: llm.chat(MESSAGES, GREEDY),
        lambda: llm.score(["hello"], [" world"]),
        lambda: list(stream),
    ]
    for call in calls:
        with pytest.raises(nv.EngineClosedError, match="this LLM was closed: make a new one"):
            call()
    require_idle(llm)
    llm.close()
    with pytest.raises(ZeroDivisionError), LLM.around(MODEL, nv.init_state(MODEL, num_pages=8)) as llm:
        raise ZeroDivisionError
    with pytest.raises(nv.EngineClosedError):
        llm.generate("hello", GREEDY)


def test_leaving_a_stream_cancels_its_request():
    llm = make()
    stream = llm.stream("hello", GREEDY)
    require_idle(llm)  # nothing is queued before the first piece
    next(stream)
    assert len(llm.state.running) == 1
    stream.close()
    require_idle(llm)

    def consume():
        for piece in llm.stream("hello", GREEDY):
            raise OSError(piece.text)

    with pytest.raises(OSError, match=r".*"):
        consume()
    require_idle(llm)
    llm.stream("hello", GREEDY).close()
    del stream
    assert len(llm.generate("hello", GREEDY)[0].token_ids) == 12


def work_per_token(num_streams):
    """The bytecodes that the shell executes while streams are read in turn, divided by the number of tokens."""
    llm, counts = make(num_pages=num_streams * num_streams, max_num_seqs=num_streams, page_size=16), [0, 0]
    params = nv.SamplingParams(temperature=0, max_tokens=num_streams + 24, ignore_eos=True)
    streams = [llm.stream([i % 40], params) for i in range(num_streams)]
    for stream in streams:
        next(stream)

    def count(frame, event, _arg):
        frame.f_trace_opcodes = True
        counts[0] += event == "opcode"
        return count

    before = sys.gettrace()
    sys.settrace(lambda frame, _event, _arg: count(frame, "call", None) if frame.f_code.co_filename == shell.__file__ else None)
    try:
        counts[1] = sum(len(piece.token_ids) for turn in zip_longest(*streams) for piece in turn if piece)
    finally:
        sys.settrace(before)
    require_idle(llm)
    return counts[0] / counts[1]


@pytest.mark.unhooked
def drop_in_a_cycle(llm: LLM) -> None:
    """Begin a stream, and leave it to the garbage collector."""
    stream = llm.stream("abc", GREEDY)
    next(stream)
    cycle: list[object] = [stream]
    cycle.append(cycle)


@pytest.mark.parametrize("thread", [False, True])
def test_a_stream_that_is_collected_in_the_middle_of_a_call_disturbs_nobody(thread: bool) -> None:
    """The collector closes it while a step runs, in the thread of the step or in another one."""

    def collects(logits):
        if thread:
            other = Thread(target=gc.collect)
            other.start()
            other.join()
        else:
            gc.collect()
        return logits

    llm, want = make(), make().generate("xyz", GREEDY)[0].token_ids
    gc.disable()
    try:
        drop_in_a_cycle(llm)
        (out,) = llm.generate("xyz", GREEDY, process_logits=collects)
    finally:
        gc.enable()
    assert (out.token_ids, out.error) == (want, None)
    require_idle(llm)


def test_a_dropped_stream_waits_for_a_state_that_can_be_changed():
    llm = make()
    stream = llm.stream("abc", GREEDY)
    next(stream)
    after, chunk = nv.prefill(llm.model, llm.state, "xyz")
    del stream
    assert llm.state.epoch == after.epoch - 1 and llm.inbox  # donated: nothing can be cancelled
    llm.state = after
    assert not llm.state.running
    llm.state = nv.release(llm.state, chunk)
    assert not llm.inbox and not llm.state.running


def test_a_dropped_stream_changes_nothing_in_another_engine():
    llm, want = make(), make().generate("xyz", GREEDY)[0].token_ids
    old = llm.stream("abc", GREEDY)
    next(old)
    llm.state = nv.init_state(MODEL, num_pages=64, page_size=4)
    new = llm.stream("xyz", GREEDY)  # its request has the number of the old one
    drawn = [*next(new).token_ids]
    del old
    assert drawn + [token for piece in new for token in piece.token_ids] == want
    require_idle(llm)


def test_a_repr_changes_nothing():
    llm = make()
    stream = llm.stream("abc", GREEDY)
    next(stream)
    state = llm.state
    del stream
    assert "1 request" in repr(llm)
    nv.prefill(MODEL, state, "xyz")  # was not donated


def test_a_token_costs_the_same_in_any_number_of_streams():
    few, many = work_per_token(8), work_per_token(64)
    assert many < 1.1 * few


def test_streams_and_generate_interleave():
    llm = make()
    prompts = ["one", "two two", "three three three"]
    expected = {p: make().generate(p, GREEDY)[0] for p in [*prompts, "within"]}
    streams = {p: llm.stream(p, GREEDY) for p in prompts}
    got = {p: [next(streams[p])] for p in prompts[:2]}
    assert llm.generate("within", GREEDY)[0].token_ids == expected["within"].token_ids  # runs the streams to their ends, too
    got["three three three"] = list(streams["three three three"])
    for p in prompts[:2]:
        got[p] += list(streams[p])
    for p in prompts:
        assert "".join(piece.text for piece in got[p]) == expected[p].text
        assert [t for piece in got[p] for t in piece.token_ids] == expected[p].token_ids
        assert got[p][-1].finish_reason == "length"
    require_idle(llm)


def test_steps_taken_outside_lose_no_token_and_a_lost_request_is_an_error():
    llm = make()
    expected = llm.generate("hello", GREEDY)[0].token_ids
    stream = llm.stream("hello", GREEDY)
    got = list(next(stream).token_ids)
    for _ in range(4):
        llm.state, _ = nv.step(llm.model, llm.state)
    assert got + [t for piece in stream for t in piece.token_ids] == expected
    stream = llm.stream("hello", GREEDY)
    next(stream)
    llm.state = nv.cancel(llm.state, llm.state.running[0].request.request_id)
    with pytest.raises(nv.InvalidRequestError, match="outside of this LLM"):
        next(stream)
    require_idle(llm)


# Chats


def test_a_chat_is_its_templates_prompt():
    llm = make()
    out = llm.chat(MESSAGES, GREEDY)
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert MODEL.tokenizer.decode(out.prompt_token_ids.tolist(), False) == text
    assert out.token_ids == llm.generate(text, GREEDY)[0].token_ids
    quick = llm.chat_tokens(MESSAGES, enable_thinking=False)
    assert MODEL.tokenizer.decode(quick, False) == text + "<think>\n\n</think>\n\n"
    assert llm.chat(MESSAGES, GREEDY, enable_thinking=False).prompt_token_ids.tolist() == quick
    again = llm.chat([*MESSAGES, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "So?"}], GREEDY)
    assert again.num_cached_tokens >= len(out.prompt_token_ids) // 4 * 4
    require_idle(llm)


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], "at least one"),
        (None, "must be a list"),
        ("Hello", "must be a list"),
        ({"role": "user", "content": "x"}, "must be a list"),
        ([3], r"messages\[0\] is 3"),
        ([{"role": "robot", "content": "x"}], r"messages\[0\]\['role'\] is 'robot'; it must be one of 'system', 'user', 'assistant'"),
        ([{"content": "x"}], r"\['role'\] is None"),
        ([{"role": ["user"], "content": "x"}], r"\['role'\] is \['user'\]"),
        ([{"role": "user"}], r"\['content'\] is None"),
        ([{"role": "user", "content": 5}], r"\['content'\] is 5"),
        ([{"role": "user", "content": "\ud800"}], "lone surrogate"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}], "nothing is left to answer"),
        ([{"role": "assistant", "content": None}, {"role": "user", "content": "x"}], r"messages\[0\]\['content'\] is None"),
    ],
)
def test_bad_messages_are_named(messages, match):
    llm = make()
    before = llm.state
    with pytest.raises(nv.InvalidRequestError, match=match):
        llm.chat(messages, GREEDY)
    assert llm.state is before


# Requests whose KV stays


@pytest.mark.unhooked
@settings(max_examples=25)
@given(st.integers(0, 24), st.integers(6, 12), st.integers(1, 6), st.booleans())
def test_a_detached_request_is_a_chunk_of_what_it_filled(steps, num_pages, budget, beside):
    model, params = MUTE, nv.SamplingParams(temperature=0, max_tokens=8)
    prompt = [3, 1, 4, 1, 5, 9, 2]
    _, whole = nv.generate(model, nv.init_state(model, num_pages=64, page_size=3), prompt, params)
    state = nv.init_state(model, num_pages=num_pages, page_size=3, max_num_batched_tokens=budget)
    if beside:
        state, _ = nv.submit(model, state, [7, 7, 7], params)
    state, (rid,) = submit_many(model, state, [prompt], [params], keep=True)
    for _ in range(steps):
        state, _ = nv.step(model, state)
        nv.check(state)
    state, chunk = detach(model, state, rid)
    nv.check(state)
    tokens = [*prompt, *whole.token_ids]
    if chunk is not None:
        assert chunk.token_ids.tolist() == tokens[: len(chunk)]
        if not beside:
            ran = state.stats.prefill_tokens + state.stats.decode_tokens
            known = tokens[len(chunk) : len(prompt)]  # the rest of the prompt, where it was not whole yet
            more = len(tokens) - len(chunk) - len(known)
            context = [chunk, known] if known else chunk
            state, gen = nv.generate(model, state, context, nv.SamplingParams(temperature=0, max_tokens=more))
            assert gen.token_ids == tokens[-more:]
            rerun = 0 if known else 1  # a filled context's last token, for its logits
            assert state.stats.prefill_tokens + state.stats.decode_tokens - ran == len(tokens) - len(chunk) + rerun
            state = nv.release(state, gen.chunk)
        state = nv.release(state, chunk)
    with pytest.raises(nv.InvalidRequestError, match="not kept, waiting or running"):
        detach(model, state, rid)
    while state.running or state.waiting:
        state, _ = nv.step(model, state)
    nv.check(state)
    assert state.pool.num_available == num_pages


def test_a_bar_is_drawn_only_when_asked_for_or_on_a_terminal(capsys):
    with bar(2, "generate", "reply", progress=True) as shown:
        shown.update(2)
    assert "generate" in capsys.readouterr().err
    with bar(2, "generate", "reply") as shown:
        shown.update(2)
    assert capsys.readouterr().err == ""
