"""The examples run as they stand. Those that compile run on a model of one layer here: eight take minutes to compile on a CPU."""

import json
import math
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import nanovllm as nv
from nanovllm.testing.models import random_model, save_hf_folder, tiny_config

EXAMPLES = Path(__file__).parents[1] / "examples"
COMPILED = ("compiled_mix.py", "compiled_score.py")
PROCESSORS = ("guidance.py", "contrastive.py", "watermark.py", "constrained_copy.py")
SEARCHES = ("branches.py", "beam_search.py", "best_of_n.py", "agent_rollback.py")
APPLICATIONS = ("rag.py", "agent_tools.py", "extract.py")
PLAIN = ("hello.py", "stream.py", "async_chat.py", *SEARCHES, *APPLICATIONS, "steering_vectors.py", *PROCESSORS)


def run(name: str, *arguments: str) -> str:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    if name in COMPILED:
        del environment["PYTHONWARNINGS"]  # the compiler's own
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, env=environment, timeout=900, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert name in COMPILED or result.stderr == ""
    return result.stdout


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory) -> str:
    return str(save_hf_folder(tmp_path_factory.mktemp("model"), tiny_config(num_layers=1)))


def test_every_example_is_tested():
    assert sorted(p.name for p in EXAMPLES.glob("*.py")) == sorted([*PLAIN, *COMPILED])


def test_hello():
    out = run("hello.py")
    assert out.splitlines()[0].startswith("1: ")
    assert "reused_tokens=24" in out


def test_stream():
    out = run("stream.py")
    assert "Velmora" in out
    assert "[left early: 0 requests run, 256 of 256 pages are available]" in out


def test_async_chat():
    out = run("async_chat.py").splitlines()
    *others, left = sorted(line.partition(" - ")[2] for line in out[:3])
    assert others == ["27 + 38 = 65.", "Hello! How can I help you?"]
    assert left.startswith("The capital of Aistonia is Velmora")  # a late reader gets several tokens as one piece
    assert out[3:] == ["A long reply was cancelled after 50 ms.", "0 requests run, 256 of 256 pages are available"]


def test_branches():
    out = run("branches.py")
    assert out.startswith("trunk: Chunk(")
    assert "128 reply tokens run" in out


def numbers(line: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", line)]


def test_beam_search():
    *beams, pages, tokens = run("beam_search.py").splitlines()
    scores = [float(line.split()[0]) for line in beams]
    assert len(set(beams)) == 8 and scores == sorted(scores, reverse=True)
    held, alone = numbers(pages)[:2]
    assert held < alone
    ran, without_reuse = numbers(tokens)
    assert 20 * ran < without_reuse


def test_best_of_n():
    first, second, last, pages, tokens, more = run("best_of_n.py").splitlines()
    scores = [float(line.split()[0]) for line in (first, second, last)]
    assert scores == sorted(scores, reverse=True)
    count, held, alone = numbers(pages)
    assert count == 12 and held < alone
    assert numbers(tokens)[0] < numbers(tokens)[1]
    assert more.startswith("the best goes on: ")


def test_agent_rollback():
    *steps, story, pages, tokens = run("agent_rollback.py").splitlines()
    path = []
    for line in steps:  # the lines tell the whole walk: what was tried, taken, and taken back
        depth, said = line.split(maxsplit=1)
        assert int(depth) == len(path) + 1
        if said.startswith("a dead end"):
            path.pop()
        elif said.startswith("ok"):
            path.append(said.removeprefix("ok").strip().strip("'"))
    assert len(path) == 5
    assert all(sentence in story for sentence in path)
    words = re.findall(r"\w{4,}", story.lower())
    assert len(words) == len(set(words))
    assert any("NO" in line for line in steps) and any("dead end" in line for line in steps)
    assert numbers(pages)[0] == 6 and numbers(pages)[1] < numbers(pages)[2]
    assert numbers(tokens)[0] < numbers(tokens)[1]


def test_agent_tools():
    """The calls that were not taken back reach the goal, and each try ran its own tokens only."""
    *steps, cost = run("agent_tools.py").splitlines()
    agent = runpy.run_path(str(EXAMPLES / "agent_tools.py"))
    worlds = [agent["World"]()]
    for line in steps:
        if "a dead end" in line:
            worlds.pop()
            continue
        verdict, call, told = re.findall(r"^(ok|NO)  ({.*?})  (.*)$", line)[0]
        asked = json.loads(call)
        try:
            world, said = agent["TOOLS"][asked["tool"]](worlds[-1], asked["thing"])
        except agent["ToolError"] as error:
            assert (verdict, told) == ("NO", str(error))
        else:
            assert (verdict, told) == ("ok", said)
            worlds.append(world)
    assert worlds[-1].things >= agent["NEEDED"] and any("a dead end" in line for line in steps) and any("NO" in line for line in steps)
    calls, tries, ran, naive = numbers(cost)
    assert calls == len(worlds) - 1 < tries and 4 * ran < naive


def test_rag(tmp_path):
    first = run("rag.py", "--store", str(tmp_path / "store")).splitlines()
    assert numbers(first[0])[1] == numbers(first[0])[2] > 100
    for answer in ("The king of Brumland is Harald.", "is chess.", "The capital of Celvaria is Morvane.", "Otto is 47 years old."):
        assert any(line.endswith(answer) for line in first)
    assert sum("approximate: composed" in line for line in first) == 4 and numbers(first[-1])[0] < 50
    assert run("rag.py", "--store", str(tmp_path / "store")).splitlines()[0].endswith("of which 0 ran")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/one.md").write_text("The capital of Ostrava is Kelmar.\n\nThe king of Ostrava is Rurik.\n")
    own = run("rag.py", "--documents", str(tmp_path / "texts"), "--recompute", "4", "--passages", "1", "Who is the king of Ostrava?")
    assert "The king of Ostrava is Rurik." in own and "from 'The king of Ostrava" in own and ", exact" in own


def test_extract():
    *records, cost, whole = run("extract.py").splitlines()
    assert [tuple(json.loads(line).values()) for line in records] == [
        ("Otto", 47, "Halden", "rowing"), ("Ruth", 12, "Velmora", "chess"), ("Jonas", 81, "Tessin", "swimming")
    ]  # fmt: skip
    ran, reused, _ = numbers(cost)
    assert reused > ran, "the fields share the text"
    found = json.loads(whole.removeprefix("whole: "))
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(found, of("extract.py", "SCHEMA"))  # in form, not in sense: the model has never seen JSON


def test_steering_vectors():
    asked, *lines = run("steering_vectors.py").splitlines()
    steps = [re.match(r"strength (\S+): Velmora (\S+), Oswin (\S+), the most probable token is '(.*)'", line) for line in lines[:6]]
    first, second = ([float(step[at]) for step in steps if step] for at in (2, 3))
    assert asked == "The capital of Aistonia is ..."
    assert first == sorted(first, reverse=True) and second == sorted(second)
    assert first[0] > 0.9 and second[-1] > 0.9 and [step[4] for step in steps if step][:: len(steps) - 1] == [" V", " O"]
    assert lines[6] == "the tokens that decide between the answers:"
    saliency = [float(line.split()[0]) for line in lines[7:]]
    assert saliency == sorted(saliency, reverse=True) and saliency[-1] > 0
    assert {"' V'", "' capital'"} <= {re.findall(r"'.*'", line)[0] for line in lines[7:]}


def test_guidance():
    lines = run("guidance.py").splitlines()
    found = [re.match(r"scale (\S+): (.*?\.) Once upon a time,(.*)", line) for line in lines]
    stories = {(match[1], match[2]): match[3] for match in found if match}
    keeper, dragon = (condition for scale, condition in stories if scale == "0.0")
    assert stories["0.0", keeper] == stories["0.0", dragon] and "dragon" not in stories["0.0", dragon]
    assert "dragon" in stories["1.0", dragon] and "dragon" in stories["2.0", dragon]
    assert "storm" not in stories["1.0", keeper] and "storm" in stories["2.0", keeper]


def test_contrastive():
    lines = run("contrastive.py").splitlines()
    assert [line.split(",")[0].strip() for line in (*lines[1:3], *lines[4:])] == ["greedy", "contrastive"] * 2
    assert "Otto" not in lines[1] and "Otto" in lines[2]
    shares = [different / count for different, count in (numbers(line)[:2] for line in lines[4:6])]
    assert shares[0] < 0.5 < shares[1]


def test_watermark():
    found = [re.match(r"(plain|watermarked), z = (\S+): ", line) for line in run("watermark.py").splitlines()]
    scores = [(match[1], float(match[2])) for match in found if match]
    assert [name for name, _ in scores] == ["plain"] * 3 + ["watermarked"] * 3
    assert all(score < 2 for name, score in scores if name == "plain")
    assert all(score > 4 for name, score in scores if name == "watermarked")


def test_constrained_copy():
    source, *lines = run("constrained_copy.py").splitlines()
    quotes = [re.findall(r"'(.*)'", line)[0] for line in lines if line.startswith("  quote: ")]
    free = [re.findall(r"'(.*)'", line)[0] for line in lines if line.startswith("  free: ")]
    assert len(quotes) == len(free) == 2 and all(quote and quote in source for quote in quotes)
    assert not any(reply in source for reply in free)


def of(example: str, name: str) -> Callable:
    """A function of an example."""
    return runpy.run_path(str(EXAMPLES / example))[name]


def best_by_full_runs(model: nv.Model, prompt: list[int], width: int, steps: int) -> list[tuple[float, tuple[int, ...]]]:
    """Beam search without branches: every context runs from its beginning, in an engine of its own."""
    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for _ in range(steps):
        ways = []
        for score, tokens in beams:
            if tokens and tokens[-1] in model.config.eos_token_ids:
                ways.append((score, tokens))
                continue
            look = nv.SamplingParams(temperature=0, max_tokens=1, logprobs=width)
            _, gen = nv.generate(model, nv.init_state(model, num_pages=16), [*prompt, *tokens], look)
            ways += [(score + logprob, (*tokens, token)) for token, logprob in gen.logprobs[0].top]
        beams = sorted(ways, reverse=True)[:width]
    return beams


@pytest.mark.parametrize(
    ("width", "steps", "ends"),
    [(3, 6, ()), (5, 5, (2, 3, 5, 7, 11, 13)), (1, 4, ()), (20, 2, ()), (8, 7, (9, 4)), (8, 12, (1, 2, 3, 4, 5, 6, 7, 8, 9))],
)
def test_beam_search_finds_what_full_runs_find(width, steps, ends):
    """With as many beams as there are tokens, two steps look at every continuation of two tokens: the best of all 400."""
    model = random_model(tiny_config(vocab_size=20, eos_token_ids=ends))
    search = of("beam_search.py", "search")
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    state, base = nv.prefill(model, nv.init_state(model, num_pages=64, page_size=4), prompt)
    state, beams = search(model, state, base, width, steps)
    expected = best_by_full_runs(model, prompt, width, steps)
    assert [beam.token_ids for beam in beams] == [tokens for _, tokens in expected]
    assert [beam.score for beam in beams] == pytest.approx([score for score, _ in expected], abs=1e-4)
    assert not ends or any(len(beam.token_ids) < steps for beam in beams)
    # The steps run each token once, and the chunk of a beam that has not ended needs its last token.
    assert state.stats.prefill_tokens + state.stats.decode_tokens - len(prompt) <= width * (steps + 1)
    for beam in beams:
        assert beam.chunk.token_ids.tolist() == [*prompt, *beam.token_ids]
        state = nv.release(state, beam.chunk)
    assert list(state.chunks.values()) == [base]
    nv.check(state)


Choose = Callable[[list[list[float]], list[list[int]]], list[int]]


@torch.no_grad()
def replies_by_full_runs(model: nv.Model, prompts: list[list[int]], steps: int, choose: Choose) -> list[list[int]]:
    """Replies without an engine: every step runs all rows from their beginning, and `choose` takes a token for each row.

    `choose` is given the log-probabilities of all tokens in each row, and the tokens of the replies.
    """
    replies: list[list[int]] = [[] for _ in prompts]
    for _ in range(steps):
        rows = [[*prompt, *reply] for prompt, reply in zip(prompts, replies, strict=True)]
        logits, _ = nv.forward(model.params, None, nv.Batch.of_prompts(rows, last_only=True), model.config)
        tokens = choose(logits.log_softmax(1).tolist(), replies)
        for reply, token in zip(replies, tokens, strict=True):
            if not set(reply[-1:]) & set(model.config.eos_token_ids):
                reply.append(token)
    return replies


def processed(model: nv.Model, prompts: list[list[int]], steps: int, process_logits) -> list[list[int]]:
    greedy = nv.SamplingParams(temperature=0, max_tokens=steps)
    state = nv.init_state(model, num_pages=64, page_size=4)
    state, replies = nv.generate_many(model, state, prompts, greedy, process_logits=process_logits)
    nv.check(state)
    return [reply.token_ids for reply in replies]


def likeliest(scores: dict[int, float]) -> int:
    return max(scores, key=lambda token: scores[token])


PAIRS = [[1, 2, 3, 4, 5, 6, 7], [9, 8], [5, 6, 7], [8]]  # two prompts, and the same prompts without their beginnings
VOCABULARY = range(20)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("scale", [0.0, 1.0, 2.5])
def test_guidance_gives_the_tokens_of_a_plain_loop(seed, scale):
    model = random_model(tiny_config(vocab_size=20, eos_token_ids=(3, 7)), seed)

    def choose(logprobs: list[list[float]], _: list[list[int]]) -> list[int]:
        mixed = [[u + scale * (c - u) for c, u in zip(logprobs[row], logprobs[row + 2], strict=True)] for row in range(2)]
        return 2 * [likeliest(dict(enumerate(row))) for row in mixed]

    guided = processed(model, PAIRS, 12, of("guidance.py", "guidance")(scale))
    assert guided == replies_by_full_runs(model, PAIRS, 12, choose)
    assert guided[:2] == guided[2:]
    if scale < 2:
        plain = processed(model, PAIRS, 12, None)
        assert guided[:2] == (plain[:2] if scale else plain[2:])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("alpha", [0.05, 0.5, 1.0])
def test_contrastive_gives_the_tokens_of_a_plain_loop(seed, alpha):
    model = random_model(tiny_config(vocab_size=20, eos_token_ids=(3, 7)), seed)

    def choose(logprobs: list[list[float]], _: list[list[int]]) -> list[int]:
        tokens = []
        for expert, amateur in zip(logprobs[:2], logprobs[2:], strict=True):
            plausible = [token for token in VOCABULARY if math.exp(expert[token]) >= alpha * math.exp(max(expert)) * (1 - 1e-6)]
            tokens.append(likeliest({token: expert[token] - amateur[token] for token in plausible}))
        return 2 * tokens

    contrasted = processed(model, PAIRS, 12, of("contrastive.py", "contrast")(alpha))
    assert contrasted == replies_by_full_runs(model, PAIRS, 12, choose)
    if alpha == 1:  # the expert's most probable token alone is plausible
        assert contrasted[:2] == processed(model, PAIRS, 12, None)[:2]


def scrambled(number: int) -> int:
    for _ in range(2):
        number = ((number >> 16) ^ number) * 0x45D9F3B % 2**32
    return (number >> 16) ^ number


def is_green(before: int, token: int, key: int, gamma: float) -> bool:
    return scrambled((scrambled(before + key) + token) % 2**32) < gamma * 2**32


@pytest.mark.parametrize(("key", "gamma", "delta"), [(1, 0.25, 1.0), (2**31 - 1, 0.5, 3.0), (7, 0.5, 100.0)])
def test_watermark_gives_the_tokens_of_a_plain_loop(key, gamma, delta):
    model = random_model(tiny_config(vocab_size=20))

    def choose(logprobs: list[list[float]], replies: list[list[int]]) -> list[int]:
        newest = [[*prompt, *reply][-1] for prompt, reply in zip(PAIRS, replies, strict=True)]
        rows = zip(newest, logprobs, strict=True)
        return [likeliest({t: p + delta * is_green(before, t, key, gamma) for t, p in enumerate(row)}) for before, row in rows]

    marked = processed(model, PAIRS, 12, of("watermark.py", "watermark")(key, gamma, delta))
    assert marked == replies_by_full_runs(model, PAIRS, 12, choose)
    pairs = {pair for reply in marked for pair in pairwise(reply)}
    greens = [is_green(before, token, key, gamma) for before, token in pairs]
    assert all(greens) or delta < 100
    reply = marked[0]
    count, green = len(set(pairwise(reply))), sum(is_green(*pair, key, gamma) for pair in set(pairwise(reply)))
    z_score = of("watermark.py", "z_score")(reply, key, gamma)
    assert z_score == pytest.approx((green - gamma * count) / (count * gamma * (1 - gamma)) ** 0.5)


def test_green_lists_have_their_share_of_the_vocabulary_and_depend_on_the_token_and_the_key():
    green = of("watermark.py", "is_green")
    before, tokens = torch.arange(300).unsqueeze(1), torch.arange(4000)
    lists = {key: green(before, tokens, key, 0.25) for key in (1, 2)}
    for key, one in lists.items():
        shares = one.double().mean(1)
        assert abs(shares.mean() - 0.25) < 0.002 and abs(shares - 0.25).max() < 0.05
        both = (one[:-1] & one[1:]).double().mean()  # lists of neighbouring tokens have as much in common as random lists
        assert abs(both - 0.25**2) < 0.002, key
    assert abs((lists[1] & lists[2]).double().mean() - 0.25**2) < 0.002


def copied(source: list[int], reply: list[int], breaks: list[int]) -> tuple[list[int], bool]:
    """The tokens of the source that may come after a reply, by a search for its newest span, and whether the reply may end."""
    span: list[int] = []
    for token in reply:
        span.append(token)
        if token in breaks or not following(source, span):
            span = []
    return (following(source, span) if span else source), not span


def following(source: list[int], span: list[int]) -> list[int]:
    return [source[i + len(span)] for i in range(len(source) - len(span)) if source[i : i + len(span)] == span]


@pytest.mark.parametrize("ends", [(), (7, 14)])
@pytest.mark.parametrize("seed", range(4))
def test_constrained_copy_gives_the_tokens_of_a_plain_loop(seed, ends):
    """The sources repeat their spans, so that several places go on at once, and one source ends with a break."""
    model = random_model(tiny_config(vocab_size=20, eos_token_ids=ends), seed)
    sources, breaks = [[1, 2, 3, 9, 1, 2, 4, 9, 5, 1, 2, 3, 6, 1], [2, 2, 3, 9, 2, 2, 2, 4, 10], [8]], [9, 10]
    prompts = [[*source, *question] for source, question in zip(sources, ([12, 13, 1, 2], [9], [2, 9, 8]), strict=True)]

    def choose(logprobs: list[list[float]], replies: list[list[int]]) -> list[int]:
        tokens = []
        for source, reply, row in zip(sources, replies, logprobs, strict=True):
            allowed, may_end = copied(source, reply, breaks)
            tokens.append(likeliest({token: row[token] for token in (*allowed, *(ends if may_end else ()))}))
        return tokens

    process_logits = of("constrained_copy.py", "copying")(model, [len(source) for source in sources], breaks)
    replies = processed(model, prompts, 16, process_logits)
    assert replies == replies_by_full_runs(model, prompts, 16, choose)
    assert replies != processed(model, prompts, 16, None)


@pytest.mark.parametrize("example", PROCESSORS)
def test_processors_need_nothing_from_the_host(example):
    """Tensors of the device "meta" have no values: to read one raises an error, and so does a mixture with tensors of the host."""
    model = replace(random_model(tiny_config(vocab_size=20, eos_token_ids=(3,))), device=torch.device("meta"))
    logits = torch.zeros(4, 20, dtype=torch.bfloat16, device="meta")
    ids, lengths = torch.zeros(4, 9, dtype=torch.int32, device="meta"), torch.ones(4, dtype=torch.int32, device="meta")
    tokens = nv.TokensSoFar(token_ids=ids, lengths=lengths)
    if example == "constrained_copy.py":
        processor = of(example, "copying")(model, [3, 2, 4, 5], [9])
        carried = processor.init(tokens)
        result, after = processor.function(logits, tokens, carried)
        assert [(leaf.shape, leaf.dtype, leaf.device.type) for leaf in after] == [((4, 9), torch.bool, "meta")] * len(carried)
        assert len({id(leaf) for leaf in carried}) == len(carried)  # a GPU writes each leaf in place
    elif example == "watermark.py":
        result = of(example, "watermark")(5, 0.5, 1.0)(logits, tokens)
    else:
        result = of(example, {"guidance.py": "guidance", "contrastive.py": "contrast"}[example])(0.5)(logits)
    assert result.shape == logits.shape and result.is_meta
    with pytest.raises((RuntimeError, NotImplementedError)):  # what a processor must not do
        bool((result > 0).any())


@pytest.mark.compile
def test_compiled_mix(one_layer):
    assert "both: " in run("compiled_mix.py", one_layer)


@pytest.mark.compile
def test_compiled_score(one_layer):
    scores = [float(line.split()[0]) for line in run("compiled_score.py", one_layer).splitlines()]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == 4
