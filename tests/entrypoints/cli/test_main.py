"""The command line, in this process, as a subprocess and on a pseudo-terminal."""

import gc
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nanovllm as nv
from nanovllm.entrypoints import arguments as arguments_module
from nanovllm.entrypoints import conversation as conversations
from nanovllm.entrypoints import process
from nanovllm.entrypoints.arguments import sampling
from nanovllm.entrypoints.cli import chat, generate
from nanovllm.entrypoints.cli import load as loading
from nanovllm.entrypoints.cli import main as cli
from nanovllm.entrypoints.cli import memory as memory_demo
from nanovllm.entrypoints.display.terminal import View
from nanovllm.entrypoints.llm import LLM
from nanovllm.testing.models import random_model, save_hf_folder, tiny_config
from nanovllm.tokenizer.messages import render

MODEL = random_model(tiny_config())
GREEDY = nv.SamplingParams(temperature=0, max_tokens=10)
REFERENCE = (Path(__file__).parents[3] / "docs/reference/command-line.md").read_text(encoding="utf-8")
COMMANDS = f"{{{','.join(re.findall(r'^## nanovllm (.+)$', REFERENCE, re.M))}}}"  # the page is generated, and a test holds it to the parser
NANOVLLM = [sys.executable, "-c", "import sys; from nanovllm.entrypoints.cli.main import main; sys.exit(main())"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A model with random weights that goes on until its length is reached."""
    return str(save_hf_folder(tmp_path_factory.mktemp("model"), tiny_config(max_position_embeddings=4096)))


@pytest.fixture
def greedy(folder) -> list[str]:
    return ["--model", folder, "--temperature", "0", "--max-tokens", "12"]


# In this process


def test_generate_prints_the_reply(folder, greedy, capsys):
    (out,) = LLM(folder, num_pages=64).generate("hello world", nv.SamplingParams(temperature=0, max_tokens=12))
    for arguments in (["hello world"], ["hello", "world"], ["--stream", "--eager", "hello world"]):
        assert cli.main(["generate", *greedy, *arguments]) == 0
        captured = capsys.readouterr()
        assert captured.out == out.text + "\n"
        assert captured.err == ""


def test_generate_reads_stdin(greedy, capsys, monkeypatch):
    cli.main(["generate", *greedy, "hello world"])
    expected = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello world\n")))
    assert cli.main(["generate", *greedy]) == 0
    assert capsys.readouterr().out == expected


def test_of_a_prompt_on_stdin_only_the_last_line_end_goes(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b" hello \n\n")))
    options = cli.build_parser(with_bench=False).parse_args(["generate"])
    assert generate._prompt(options) == " hello \n"


def test_generate_takes_a_file_of_prompts(folder, greedy, capsys, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo é\n", encoding="utf-8")
    assert cli.main(["generate", *greedy, "--prompts", str(file)]) == 0
    replies = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    outs = LLM(folder, num_pages=64).generate(["one", "two é"], nv.SamplingParams(temperature=0, max_tokens=12))
    assert [r["prompt"] for r in replies] == ["one", "two é"]
    assert [r["text"] for r in replies] == [out.text for out in outs]
    assert {r["finish_reason"] for r in replies} == {"length"}


def test_only_a_line_feed_ends_a_prompt_in_a_file(greedy, capsys, tmp_path):
    file, odd = tmp_path / "prompts.txt", "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1dh\x1ei\rj"
    file.write_bytes(f"{odd}\r\n{odd}k\n".encode())
    assert cli.main(["generate", *greedy, "--prompts", str(file)]) == 0
    replies = [json.loads(line) for line in capsys.readouterr().out.removesuffix("\n").split("\n")]
    assert [reply["prompt"] for reply in replies] == [odd, f"{odd}k"]


@pytest.mark.parametrize("chat", [[], ["--chat"]])
def test_a_fault_of_a_prompt_in_a_file_names_the_line(chat, greedy, capsys, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo\n" + 5000 * "x" + "\nfive\n")
    assert cli.main(["generate", *greedy, *chat, "--prompts", str(file)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(
        f"nanovllm: error: {re.escape(str(file))}:4: the (prompt|conversation) has (more than )?\\d+ tokens[;,] .*\n", captured.err
    )


def test_a_file_that_is_not_utf8_or_has_no_prompts_is_named(greedy, capsys, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"one\n\xff\n")
    assert cli.main(["generate", *greedy, "--prompts", str(file)]) == 2
    assert capsys.readouterr().err == f"nanovllm: error: {file}: byte 0xff at position 4 is not valid UTF-8\n"
    file.write_text("\n \n")
    with pytest.warns(UserWarning, match=f"no prompts in {file}"):
        assert cli.main(["generate", *greedy, "--prompts", str(file)]) == 0
    assert capsys.readouterr().out == ""


def test_a_terminal_is_told_why_a_reply_was_cut(folder, greedy, capsys, monkeypatch, tmp_path):
    file, full = tmp_path / "prompts.txt", "stopped because the context is full\n"
    file.write_text("one\ntwo two two two\n")
    several = ["--prompts", str(file), "--max-model-len", "24"]
    for arguments, told in (
        (["x"], "stopped after 12 tokens (--max-tokens)\n"),
        (["--stream", "--chat", "x"], "stopped after 12 tokens (--max-tokens)\n"),
        (several, f"1 of 2 replies stopped after 12 tokens (--max-tokens); 1 of 2 replies {full}"),
    ):
        assert cli.main(["generate", *greedy, *arguments]) == 0
        assert "stopped" not in capsys.readouterr().err
        with monkeypatch.context() as patch:
            patch.setenv("NO_COLOR", "1")
            patch.setattr(sys.stderr, "isatty", lambda: True)
            assert cli.main(["generate", *greedy, *arguments]) == 0
        assert capsys.readouterr().err.endswith(told)


@pytest.mark.parametrize("more", [[], ["--stream"]])
def test_a_reply_that_the_kv_memory_cuts_is_told_without_a_terminal(more, greedy, capsys):
    assert cli.main(["generate", *greedy, *more, "x", "--num-pages", "1", "--max-tokens", "3000"]) == 0
    assert capsys.readouterr().err == "stopped because the KV memory is full: a larger --num-pages gives more\n"


def test_generate_chats(folder, greedy, capsys):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    out = LLM(folder, num_pages=64).chat(messages, nv.SamplingParams(temperature=0, max_tokens=12), enable_thinking=False)
    assert cli.main(["generate", *greedy, "--chat", "--system", "Be brief.", "--no-think", "Hello"]) == 0
    assert capsys.readouterr().out == out.text + "\n"


def test_sampling_flags_reach_the_request(folder):
    flags = "--temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --max-tokens 4 --seed 7 --stop a --stop b --repetition-penalty 1.1"
    flags += " --presence-penalty 0.5 --frequency-penalty 0.25 --ignore-eos"
    options = cli.build_parser(with_bench=False).parse_args(["generate", "--model", folder, *flags.split(), "x"])
    assert sampling(options, MODEL) == nv.SamplingParams(
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        max_tokens=4,
        seed=7,
        stop=("a", "b"),
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        ignore_eos=True,
    )
    options = cli.build_parser(with_bench=False).parse_args(["generate", "x"])
    assert sampling(options, MODEL) == nv.SamplingParams(temperature=0, max_tokens=256)  # an empty generation_config is greedy


@pytest.mark.parametrize(("command", "text"), [(generate, ["x"]), (chat, []), (memory_demo, ["x"])])
def test_options_of_the_model_reach_the_loader(command, text, monkeypatch):
    seen = []

    def load(*given, **where):
        seen.append((given, where))
        raise nv.CheckpointError("enough")

    monkeypatch.setattr(loading, "load_model", load)
    flags = "--model m --device cpu --dtype bfloat16 --max-model-len 100 --revision abc --download --trust-remote-code --quantization int8"
    assert cli.main([command.__name__.split(".")[-1], *flags.split(), *text]) == 2
    wanted = {"max_model_len": 100, "revision": "abc", "download": True, "trust_remote_code": True}
    wanted |= {"quantization": "int8", "quantize_head": False, "fp8_activations": False}
    assert seen == [(("m", "cpu", "bfloat16"), wanted)]


def test_options_of_a_chat_reach_it(monkeypatch):
    runs = []
    monkeypatch.setattr(loading, "load", lambda _: MODEL)
    monkeypatch.setattr(chat, "run", lambda model, state, params, **options: runs.append((state.config.max_model_len, options)) or 0)
    flags = ["--system", "Be brief.", "--no-think", "--retain", "gap", "--max-model-len", "100"]
    assert cli.main(["chat", *flags]) == cli.main(["chat"]) == 0
    assert runs == [
        (100, {"system": "Be brief.", "thinking": False, "retain": "gap"}),
        (512, {"system": None, "thinking": True, "retain": "recompute"}),
    ]


def test_a_character_that_the_output_lacks_is_replaced(monkeypatch):
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, "ascii"))
    monkeypatch.setattr(generate, "run_generate", lambda options: print("caf\xe9", flush=True) or 0)
    assert cli.main(["generate", "x"]) == 0
    assert out.getvalue() == b"caf?\n"


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["generate", "--model", "no-such-model", "x"], "'no-such-model' is neither a folder nor a repository"),
        (["generate", "--model", "qwen3-0.6b", "x"], "'qwen3-0.6b' names a shape for random weights, which only check, tune, bench"),
        (["generate", "--top-p", "1.5", "x"], r"top_p=1.5: must be a number in \(0.0, 1.0\]"),
        (["generate", "--max-tokens", "0", "x"], "max_tokens=0"),
        (
            ["generate", "--seed", "-1", "x"],
            r"seed=-1: must be an integer in .*; without a seed the engine chooses one$",
        ),
        (["generate", "--max-model-len", "0", "x"], "error: --max-model-len 0 must be an integer of at least 1$"),
        (["generate", "--tuning", "no.json", "--device", "cpu", "x"], "on cpu this engine captures none: leave tuning out"),
        (["generate", 5000 * "x"], "5000 tokens; the model's limit is 4096 tokens, one of them generated: shorten the prompt$"),
        (["generate", "--max-model-len", "9", "ten letters"], "holds at most 9, .*: shorten the prompt, or raise --max-model-len$"),
        (["generate", "--num-pages", "1", 20 * "x"], r"holds at most 16, .*, or raise the KV memory \(--num-pages, --num-frames\)$"),
        (["tune", "--device", "cpu"], "tune needs a CUDA GPU, and this device is cpu: "),
        (["generate", "--device", "abacus", "x"], "device='abacus'"),
        (["generate", "--num-pages", "0", "x"], "--num-pages 0"),
        (["generate", "--num-frames", "4", "x"], "--num-frames 4: \\w+ has no sliding-window layers"),
        (["generate", "--num-pages", "1", "a long prompt"], "13 tokens; this engine holds at most"),
        (["generate", ""], "the prompt is empty"),
        (["generate", "--chat", ""], "the prompt is empty"),
        (["generate", "\udcff"], r"byte 0xff at position 0 is not valid UTF-8 \(lone surrogate U\+DCFF at position 0\)"),
        (["generate", "--no-think", "x"], "add --chat"),
        (["generate", "--system", "Be brief.", "x"], "add --chat"),
        (["generate", "--prompts", "p", "x"], "cannot be combined with a prompt"),
        (["generate", "--prompts", "p", "--stream"], "cannot be combined with a prompt or --stream"),
        (["generate", "--prompts", "/no/such/file"], "No such file"),
        (["chat", "--max-model-len", "9999"], "--max-model-len 9999 exceeds"),
        (["bench", "--which", "", "--device", "cpu"], "unknown workload ''; choose from b1"),
        (["bench", "--which", "b1,foo", "--device", "cpu"], "unknown workload 'foo'; choose from b1, b8, b64, offline, prefix, fewshot"),
        (["bench", "--dtype", "int7", "--device", "cpu"], "dtype 'int7' is not a floating-point torch dtype"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_errors_are_one_line_and_exit_2(folder, capsys, arguments, match):
    model = [] if "--model" in arguments else ["--model", folder]
    page_size = ["--max-model-len", "12"] if "a long prompt" in arguments else []
    assert cli.main([arguments[0], *model, *page_size, *arguments[1:]]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"nanovllm: error: .*\n", captured.err)
    assert re.search(match, captured.err)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], f"the following arguments are required: {COMMANDS} (see nanovllm --help)"),
        (["--no-such-option", "chat"], "unrecognized arguments: --no-such-option (see nanovllm --help)"),
        (
            ["serve", "--quantisation", "int8", "--seqs=3"],
            "unrecognized arguments: --quantisation --seqs=3: did you mean --quantization and --max-num-seqs? (see nanovllm serve --help)",
        ),
        (["chat", "--no-such-option"], "unrecognized arguments: --no-such-option (see nanovllm chat --help)"),
        (["bench", "--repeats", "0"], "argument --repeats: '0' must be an integer of at least 1 (see nanovllm bench --help)"),
        (["bench", "--batches", "1,x\ny"], r"argument --batches: 'x\ny' must be an integer of at least 1 (see nanovllm bench --help)"),
        (["profile", "a\n b"], "unrecognized arguments: a b (see nanovllm profile --help)"),
        (["generate", "--top-k", "many", "x"], "argument --top-k: invalid int value: 'many' (see nanovllm generate --help)"),
        (["eval-reuse", "--questions"], "argument --questions: expected one argument (see nanovllm eval-reuse --help)"),
        (["memory", "--model"], "argument --model: expected one argument (see nanovllm memory --help)"),
        (["check", "a", "b"], "unrecognized arguments: b (see nanovllm check --help)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_usage_errors_are_one_line_that_names_the_help(capsys, arguments, told):
    with pytest.raises(SystemExit) as exit:
        cli.main(arguments)
    assert exit.value.code == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"nanovllm: error: {told}\n")


def test_an_unknown_command_is_told_which_there_are(capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["chatter"])
    assert exit.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("nanovllm: error: ") and err.endswith("(see nanovllm --help)\n") and "'chatter'" in err and "memory" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", [[], ["generate"], ["chat"], ["memory"], ["models"], ["check"], ["tune"], ["bench"], ["profile"]])
def test_help_and_version(command, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main([*command, "--help"])
    assert exit.value.code == 0
    usage, purpose, *_ = capsys.readouterr().out.split("\n\n")
    assert usage.startswith(f"usage: {' '.join(['nanovllm', *command])}") and purpose.rstrip().endswith(".")
    with pytest.raises(SystemExit) as exit:
        cli.main([*command, "--no-such-option"])
    assert exit.value.code == 2
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert re.search(r"^nanovllm \d+\.\d+", capsys.readouterr().out, re.M)


def test_ctrl_c_exits_130(greedy, monkeypatch, capsys):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "generate", interrupted)
    assert cli.main(["generate", *greedy, "x"]) == 130
    assert capsys.readouterr().err == "\n"


# A conversation


def ask(model, state, conversation, text, params=GREEDY):
    asked = chat.replace(conversation, messages=(*conversation.messages, {"role": "user", "content": text}))
    shown = []
    state, answered, figures = chat.turn(model, state, asked, params, shown.append)
    nv.check(state)
    assert answered.messages[-1] == {"role": "assistant", "content": "".join(shown)} or figures.finish_reason in ("stopped", "error")
    return state, answered, figures


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_turn_runs_only_what_is_new_in_it(page_size):
    state, conversation = nv.init_state(MODEL, num_pages=2048 // page_size, page_size=page_size), chat.Conversation()
    for text in ("Hello", "And then?", "So."):
        before, chunk = state.stats, conversation.chunk
        state, conversation, figures = ask(MODEL, state, conversation, text)
        tokens = render(MODEL.tokenizer, conversation.messages[:-1])
        alone = LLM(MODEL, num_pages=256).generate([tokens], GREEDY)[0]
        assert conversation.messages[-1]["content"] == alone.text
        assert figures.prompt == len(tokens) == figures.run + figures.reused
        shared = 0
        while chunk is not None and shared < min(len(chunk), len(tokens)) and chunk.token_ids[shared] == tokens[shared]:
            shared += 1
        assert figures.run <= len(tokens) - shared
        assert figures.reply == len(alone.token_ids) == state.stats.decode_tokens - before.decode_tokens + 1
        assert list(state.chunks.values()) == [conversation.chunk]
    state = nv.release(state, conversation.chunk)
    assert state.pool.num_available == state.config.num_pages


def test_ctrl_c_keeps_the_part_of_the_reply_that_is_there(monkeypatch):
    state, conversation = nv.init_state(MODEL, num_pages=256), chat.Conversation()
    whole = LLM(MODEL, num_pages=256).chat([{"role": "user", "content": "Hello"}], GREEDY)
    real, steps = conversations.step, []

    def interrupted(model, state):
        steps.append(None)
        if len(steps) == 4:
            signal.raise_signal(signal.SIGINT)
        return real(model, state)

    monkeypatch.setattr(conversations, "step", interrupted)
    state, conversation, figures = ask(MODEL, state, conversation, "Hello")
    assert figures.finish_reason == "stopped"
    assert figures.reply == 4
    assert conversation.messages[-1]["content"] == MODEL.tokenizer.decode(whole.token_ids[:4])
    assert not state.running
    state, conversation, figures = ask(MODEL, state, conversation, "Go on")
    assert figures.finish_reason == "length"
    assert figures.reused >= len(whole.prompt_token_ids)


def test_further_ctrl_c_in_one_step_ends_the_reply_alone(greedy, capsys, monkeypatch):
    real, steps = conversations.step, []

    def interrupted(model, state):
        steps.append(None)
        for _ in range(3 * (len(steps) == 4)):
            signal.raise_signal(signal.SIGINT)
        return real(model, state)

    monkeypatch.setattr(conversations, "step", interrupted)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\nHello\n/stats\n"))
    assert cli.main(["chat", *greedy]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("[stopped]") == 1
    assert len(steps) > 12
    assert "12 reply tokens (length)" in captured.err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_of_the_engine_ends_the_reply_and_the_chat_goes_on(greedy, capsys, monkeypatch):
    real, steps = conversations.step, []

    def broken(*args, **options):
        raise nv.OutOfPagesError("the device's memory ran out")

    def failing(model, state):
        steps.append(None)
        if len(steps) in (1, 6):
            with monkeypatch.context() as patch:  # in the middle of device work
                patch.setattr(state.runtime.executor, "prefill", broken)
                patch.setattr(state.runtime.executor, "decode", broken)
                real(model, state)
        state, outputs = real(model, state)
        nv.check(state)
        return state, outputs

    monkeypatch.setattr(conversations, "step", failing)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\nHello\nAnd then?\n/stats\n"))
    assert cli.main(["chat", *greedy]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("error: the device's memory ran out\n") == 2
    assert "12 reply tokens (length)" in captured.err
    state, conversation = nv.init_state(MODEL, num_pages=256), chat.Conversation()
    steps.clear()
    state, conversation, figures = ask(MODEL, state, conversation, "Hello")
    assert (figures.finish_reason, figures.reply) == ("error", 0)
    state, conversation, figures = ask(MODEL, state, chat.Conversation(chunk=conversation.chunk), "Hello")
    assert (figures.finish_reason, figures.reply) == ("error", 4)
    state = nv.release(state, conversation.chunk)
    assert state.pool.num_available == state.config.num_pages


def test_a_conversation_that_is_full_is_refused_and_stays(monkeypatch):
    state, conversation = nv.init_state(MODEL, num_pages=4), chat.Conversation()
    state, conversation, _ = ask(MODEL, state, conversation, "Hi")
    with pytest.raises(nv.InvalidRequestError, match="/reset"):
        ask(MODEL, state, conversation, "much longer than the pool" * 3)
    nv.check(state)
    state = nv.release(state, conversation.chunk)


def test_a_conversation_of_all_tokens_leaves_no_room_for_a_reply():
    state, empty = nv.init_state(MODEL, num_pages=4), len(render(MODEL.tokenizer, [{"role": "user", "content": ""}]))
    with pytest.raises(nv.InvalidRequestError, match="the conversation has 64 tokens, but the engine holds 64: use /reset"):
        ask(MODEL, state, chat.Conversation(), "x" * (64 - empty))
    _, _, figures = ask(MODEL, state, chat.Conversation(), "x" * (63 - empty))
    assert (figures.reply, figures.finish_reason) == (1, "length")


def test_the_beginning_of_a_stop_text_is_not_shown():
    """What is shown piece by piece is the reply, which ends before the stop text."""
    params = nv.SamplingParams(temperature=0, max_tokens=40, logit_bias=dict.fromkeys(MODEL.tokenizer.encode("abc"), 100.0))
    state, conversation, _ = ask(MODEL, nv.init_state(MODEL, num_pages=64), chat.Conversation(), "Hello", params)
    whole = conversation.messages[-1]["content"]
    assert set(whole) <= set("abc") and len(whole) == 40
    stop = whole[-4:]
    state, conversation, figures = ask(MODEL, state, chat.Conversation(), "Hello", chat.replace(params, stop=stop))
    assert figures.finish_reason == "stop"
    assert conversation.messages[-1]["content"] == whole[: whole.index(stop)]


def test_chat_reads_commands_from_a_pipe(greedy, capsys, monkeypatch):
    lines = ["Hello", "/stats", "", "/what", "/no_think", "/think", "/help", "/memory", "/reset", "/memory", "/stats", "Hello", "/exit"]
    lines.append("never read")
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    assert cli.main(["chat", *greedy]) == 0
    captured = capsys.readouterr()
    half = captured.out[: len(captured.out) // 2]
    assert captured.out == half * 2  # after /reset the same question has the same answer
    assert re.search(r"\] \d+ pages: conversation \(chunk \d+, \d+ tokens\)", captured.err)
    assert "(0 held by chunks, 0 by requests, " in captured.err
    for part in ("24 run, 0 reused", "unknown command /what", "Thinking is off.", "Thinking is on.", "Ctrl-D leaves", "no turn yet"):
        assert part in captured.err


def test_a_reset_keeps_the_system_message_and_the_thinking(greedy, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n/stats\n/reset\nHello\n/stats\n"))
    assert cli.main(["chat", *greedy, "--system", "Be brief.", "--no-think"]) == 0
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    length = len(render(MODEL.tokenizer, messages, enable_thinking=False))
    assert re.findall(r"last turn: (\d+) prompt tokens", capsys.readouterr().err) == [str(length)] * 2


def test_a_message_without_any_reply_is_forgotten(greedy, capsys, monkeypatch):
    real, steps = conversations.step, []

    def failing(model, state):
        steps.append(None)
        if len(steps) == 1:
            raise nv.OutOfPagesError("the device's memory ran out")
        return real(model, state)

    monkeypatch.setattr(conversations, "step", failing)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Lost\nHello\n/stats\n"))
    assert cli.main(["chat", *greedy]) == 0
    length = len(render(MODEL.tokenizer, [{"role": "user", "content": "Hello"}]))
    assert f"last turn: {length} prompt tokens" in capsys.readouterr().err


def test_input_that_is_not_utf8_is_named_and_the_chat_goes_on(greedy, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\nHello\n/stats\n"), "utf-8", "surrogateescape"))
    assert cli.main(["chat", *greedy]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("error: byte 0xe9 at position 3 is not valid UTF-8")
    assert "12 reply tokens (length)" in captured.err


@pytest.mark.parametrize("retain", ["all", "recompute", "shift", "gap"])
def test_a_chat_takes_every_way_to_keep_answers(greedy, capsys, monkeypatch, retain):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\nHello\n/stats\n"))
    assert cli.main(["chat", *greedy, "--retain", retain]) == 0
    assert "12 reply tokens (length)" in capsys.readouterr().err


def test_a_warning_is_one_line(greedy, capsys, monkeypatch):
    def warned(options):
        print(
            warnings.formatwarning(UserWarning("slow,\nas it is"), UserWarning, "entrypoints/cli/main.py", 1, "the line"),
            file=sys.stderr,
            end="",
        )
        raise nv.OutOfPagesError("full")

    before = warnings.formatwarning
    monkeypatch.setattr(generate, "run_generate", warned)
    assert cli.main(["generate", *greedy, "x"]) == 2
    assert capsys.readouterr().err == "nanovllm: warning: slow, as it is\nnanovllm: error: full\n"
    assert warnings.formatwarning is before


def test_without_a_compiler_one_line_tells_so(greedy, tmp_path):
    environment = {**os.environ, "CC": "/nonexistent", "XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    command = [*NANOVLLM, "generate", *greedy, "--device", "cpu", "x"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    wanted = r"nanovllm: warning: CC='/nonexistent' is not an executable program; .*: decoding on the CPU is .*\n"
    assert re.fullmatch(wanted, done.stderr)


def test_help_tells_the_defaults(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    for command, *told in (
        ("generate", "(default: enough for requests of full length, but at most 4 GiB on a CPU", "skip empty lines"),
        ("chat", "{all,recompute,shift,gap}", "(default: recompute)"),
        ("memory", "(default: 256; 96 for the demonstration)"),
        ("bench", "tiny, a folder, a repository", "(default: qwen3-0.6b on a GPU, tiny on a CPU)"),
        ("eval-reuse", "(default: enough for the measurement)"),
    ):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        out = capsys.readouterr().out
        assert all(part in out for part in told), (command, out)


# What is shown


def shown_of(text, cuts, view):
    pieces, start = [], 0
    for stop in [*sorted(cuts), len(text)]:
        view, piece = view.push(text[start:stop])
        pieces.append(piece)
        start = stop
    return re.sub(r"(\x1b\[0m)(\s*)\x1b\[2m", r"\2", "".join(pieces) + view.end())


@given(st.data())
def test_a_view_dims_thoughts_and_leaves_empty_ones_out(data):
    word = st.sampled_from(["a", "b c", "<", "<th", "x\ny", "é"])
    thought, answer = data.draw(st.none() | st.lists(word, max_size=3).map(" ".join)), data.draw(st.lists(word, min_size=1).map(" ".join))
    text = answer if thought is None else f"<think>\n{thought}\n</think>\n\n{answer}"
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=5))
    expected = answer if not thought else f"\x1b[2m{thought}\x1b[0m\n\n{answer}"
    assert shown_of(text, cuts, View(styled=True, clean=True)) == expected
    if thought is not None:  # a template that opens the block itself
        cuts = [max(0, cut - 8) for cut in cuts]
        assert shown_of(text.removeprefix("<think>\n"), cuts, View(styled=True, clean=True, inside=True)) == expected
    assert shown_of(text, cuts, View(styled=False, clean=True)) == text


def test_a_reply_cannot_steer_the_terminal():
    assert shown_of("a\x1b[31mb\x07\r\tc\n", [2], View(styled=True, clean=True)) == "a\ufffd[31mb\ufffd\ufffd\tc\n"
    assert shown_of("a\x1b[31m", [], View(styled=False, clean=True)) == "a\ufffd[31m"
    assert shown_of("a\x1b[31m", [], View(styled=False, clean=False)) == "a\x1b[31m"


class Screen(io.StringIO):
    """A terminal, or a program that pretends to be one."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("name", ["", "NO_COLOR", "TERM"])
def test_a_terminal_without_styles_is_not_steered_either(name, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if name:
        monkeypatch.setenv(name, "dumb")
    view = View.of(Screen(), chat_prompt="x")
    assert (view.styled, view.clean) == (not name, True)
    assert view.push("a\x1b[31m")[1] == "a\ufffd[31m"
    assert View.of(io.StringIO(), chat_prompt="x") == View(styled=False, clean=False)
    assert not View.of(Screen()).styled  # a text that is continued has no think blocks


@pytest.mark.parametrize(("prompt", "inside"), [("<think>", True), ("x<think>\n", True), ("<think>\n\n</think>\n\n", False), ("x", False)])
def test_a_prompt_may_have_opened_the_think_block(prompt, inside):
    assert View.of(io.StringIO(), chat_prompt=prompt).inside == inside


# A pseudo-terminal


class Terminal:
    """A subprocess on a pseudo-terminal."""

    def __init__(self, *arguments: str):
        self.master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1"}
        environment.pop("NO_COLOR", None)
        program = f"import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); {NANOVLLM[-1]}"  # so that Ctrl-C is a signal to it
        self.process = subprocess.Popen(
            [*NANOVLLM[:-1], program, *arguments], stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        os.close(slave)
        self.text = ""

    def send(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, pattern: str, again: str = "") -> str:
        """Read until the pattern shows; returns, and forgets, all up to its end. `again` is sent where nothing comes for some seconds."""
        deadline = time.monotonic() + 240
        while not (found := re.search(pattern, self.text)):
            ready, _, _ = select.select([self.master], [], [], 5)
            assert time.monotonic() < deadline, f"{pattern!r} did not come: {self.text[-2000:]!r}"
            if not ready:
                self.send(again)
                continue
            try:
                data = os.read(self.master, 65536)
            except OSError:  # the other side is closed
                data = b""
            assert data, f"the program ended before {pattern!r}: {self.text[-2000:]!r}"
            self.text += data.decode(errors="replace")
        before, self.text = self.text[: found.end()], self.text[found.end() :]
        return before

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


def test_chat_on_a_terminal(folder):
    with Terminal("chat", "--model", folder, "--temperature", "0", "--max-tokens", "3000", "--device", "cpu") as terminal:
        terminal.wait_for("/help shows the commands")
        terminal.wait_for(">>> ")
        terminal.send("\x03")
        terminal.wait_for("Ctrl-C stops a reply", again="\x03")  # `input` can miss a signal that comes while it shows its prompt
        terminal.wait_for(">>> ")
        terminal.send("Hello\n")
        terminal.wait_for("Hello\r\n(.|\n)*?[^\r\n]{5}")  # the reply has begun, and its end is thousands of tokens away
        terminal.send("\x03")
        terminal.wait_for(r"\[stopped\]")
        terminal.wait_for(">>> ")
        terminal.send("/stats\n")
        text = terminal.wait_for("since the start.*\n")
        found = re.search(r"last turn: (\d+) prompt tokens: (\d+) run, 0 reused; (\d+) reply tokens \(stopped\)", text)
        assert found and found[1] == found[2] and 5 <= int(found[3]) < 3000
        terminal.wait_for(">>> ")
        terminal.send("/reset\n")
        terminal.wait_for("A new conversation")
        terminal.wait_for(">>> ")
        terminal.send("\x04")
        assert terminal.process.wait(timeout=240) == 0


def test_generate_on_a_terminal(folder):
    options = ["--model", folder, "--temperature", "0", "--max-tokens", "5", "--device", "cpu"]
    with Terminal("generate", "--stream", "Hello", *options) as terminal:
        text = terminal.wait_for(r"tokens/s\]")
        assert "\x1b[2mHello\x1b[0m" in text
        assert "5 prompt tokens, 5 tokens (length)" in text
        assert terminal.process.wait(timeout=240) == 0


def test_output_that_nobody_reads_is_no_error(folder):
    process = subprocess.Popen(
        [*NANOVLLM, "generate", "--model", folder, "--stream", "--max-tokens", "2000", "x"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=240) == 0
    assert process.stderr.read() == b""
    process.stderr.close()


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_output_that_cannot_be_written_is_one_line(greedy, stream):
    with open("/dev/full", "w") as full:
        done = subprocess.run([*NANOVLLM, "generate", *greedy, *stream, "x"], check=False, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "nanovllm: error: the output could not be written: No space left on device\n")


def test_an_os_error_that_is_not_of_the_output_is_not_hidden(monkeypatch):
    def broken(options):
        raise FileNotFoundError(2, "No such file or directory", "a-bug")

    monkeypatch.setattr(generate, "run_generate", broken)
    with pytest.raises(FileNotFoundError):
        cli.main(["generate", "x"])


def test_start_up_does_not_import_transformers():
    modules = ("transformers", "huggingface_hub", "torch._inductor", "matplotlib", "nanovllm.entrypoints.cli.bench")
    code = f"import sys, nanovllm.entrypoints.cli.main; print([m for m in {modules} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_command_is_installed():
    script = Path(sys.executable).with_name("nanovllm")
    assert subprocess.run([script, "--version"], capture_output=True, text=True, check=True).stdout.startswith("nanovllm ")


def test_only_a_process_of_our_own_is_frozen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    before, calls = gc.get_freeze_count(), []
    monkeypatch.setattr(arguments_module, "freeze", lambda: calls.append(1))
    arguments = ["generate", "--max-tokens", "2", "Once upon a time"]
    assert cli.main(arguments) == 0 and not calls
    monkeypatch.setattr(sys, "argv", ["nanovllm", *arguments])
    assert cli.main() == 0 and calls == [1]
    monkeypatch.undo()
    try:
        process.freeze()
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()
