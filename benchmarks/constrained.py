"""Measure what grammars cost: replies in JSON beside free ones, and free replies that run beside replies in JSON.

    python -m benchmarks.constrained --model qwen3-0.6b --output benchmarks/results/h200-constrained.json
    python -m benchmarks.constrained --model tiny --device cpu --rows 8 --max-tokens 64

A shape's name stands for random weights with a tokenizer of as many tokens. The schema asks for a list of objects that is longer than any
reply, so that all rows run to the end. The workloads take turns, `--repeats` times; the figures are medians:

- `free`: no reply has a grammar;
- `json`: every reply has it;
- `both`: every second reply has it.

`free_beside` is the share of the tokens a second of `free` that `both` reaches, and `json_share` that of `json`. Before that, each workload
runs once. Sampling is at temperature 0.8 in all of them. Of a step of `json` the result has these times:

- `mask_us`: the time in which llguidance fills the masks, as a mean over the steps, and `mask_us_median`, as a median;
- `fill_us`: the time of all that is done for the masks, of which that is a part, as a median;
- `read_us`: the time in which the grammars read the tokens, as a median.

Texts of at most some characters cost the most: in them llguidance asks for every token of the vocabulary whether it fits. `--strings free`
has texts of any length in their place, and `--strings none` has numbers.
"""

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import nanovllm as nv
from benchmarks.http_bench import shape_folder
from nanovllm.engine.constrained import Constrained
from nanovllm.entrypoints.arguments import positive
from nanovllm.entrypoints.cli.bench.environment import record
from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES
from nanovllm.entrypoints.cli.bench.workloads import random_tokens
from nanovllm.sampling.matchers import Matchers

PROMPT = 128
STRINGS: dict[str, dict[str, Any]] = {"short": {"type": "string", "maxLength": 24}, "free": {"type": "string"}, "none": {"type": "integer"}}
WORKLOADS = ("free", "json", "both")


def schema(strings: str) -> dict[str, Any]:
    """A list of objects, longer than any reply, with texts of a key of `STRINGS`."""
    properties = {
        "name": STRINGS[strings],
        "kind": {"enum": ["bird", "fish", "fox", "tree"]},
        "count": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["old", "young", "red", "grey"]}, "maxItems": 3},
    }
    item = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "array", "minItems": 4000, "items": item}


TIMES = ("mask_us", "mask_us_median", "fill_us", "read_us")


class Watch:
    """The seconds of each call of the functions in which a step's masks are made and its tokens are read."""

    def __init__(self) -> None:
        """Nothing was called yet."""
        self.seconds: dict[str, list[float]] = {"mask": [], "fill": [], "read": []}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Note the seconds of calls in this context."""
        timed = (("mask", Matchers, "fill"), ("fill", Constrained, "fill"), ("read", Constrained, "read"))
        with contextlib.ExitStack() as stack:
            for key, owner, name in timed:
                stack.enter_context(mock.patch.object(owner, name, self._timed(self.seconds[key], getattr(owner, name))))
            yield

    def clear(self) -> None:
        """Forget what was noted."""
        for seconds in self.seconds.values():
            seconds.clear()

    def times(self) -> dict[str, int]:
        """Microseconds of a call, by the names in `TIMES`."""
        medians = {key: statistics.median(seconds) for key, seconds in self.seconds.items()}
        found = statistics.mean(self.seconds["mask"]), medians["mask"], medians["fill"], medians["read"]
        return {name: round(1e6 * seconds) for name, seconds in zip(TIMES, found, strict=True)}

    @staticmethod
    def _timed(seconds: list[float], function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begin = time.perf_counter()
            result = function(*arguments)
            seconds.append(time.perf_counter() - begin)
            return result

        return timed


def measure(llm: nv.LLM, rows: int, max_tokens: int, repeats: int, strings: str) -> dict[str, list[float]]:
    """Tokens a second of each workload, as often as it was repeated; under the names in `TIMES` microseconds of a step of `json`."""
    draw, vocabulary = Random(0), llm.model.config.vocab_size
    free = nv.SamplingParams(temperature=0.8, max_tokens=max_tokens, ignore_eos=True, seed=1)
    bound = nv.SamplingParams(temperature=0.8, max_tokens=max_tokens, seed=1, grammar=nv.Grammar.json_schema(schema(strings)))
    params: dict[str, Any] = {"free": [free] * rows, "json": [bound] * rows, "both": [(free, bound)[row % 2] for row in range(rows)]}
    found: dict[str, list[float]] = {name: [] for name in (*WORKLOADS, *TIMES)}
    watch = Watch()
    with watch.watching():
        for repeat in range(repeats + 1):
            for name in WORKLOADS:
                prompts = [random_tokens(draw, PROMPT, vocabulary) for _ in range(rows)]
                watch.clear()
                start = time.perf_counter()
                replies = llm.generate(prompts, params[name])
                seconds = time.perf_counter() - start
                tokens = sum(len(reply.token_ids) for reply in replies)
                if tokens != rows * max_tokens:
                    raise RuntimeError(f"{name}: {tokens} tokens of {rows * max_tokens}: a reply ended early")
                if not repeat:
                    continue
                found[name].append(round(tokens / seconds, 1))
                if name == "json":
                    for key, value in watch.times().items():
                        found[key].append(value)
    return found


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="a model, or a name of `model_shapes.py` (default: %(default)s)")
    parser.add_argument("--device", help="cpu or cuda (default: a GPU if torch sees one)")
    parser.add_argument("--strings", choices=STRINGS, default="short", help="the texts in the schema (default: %(default)s)")
    parser.add_argument("--rows", type=positive, default=64, help="replies at the same time (default: %(default)s)")
    parser.add_argument("--max-tokens", type=positive, default=256, help="tokens of a reply (default: %(default)s)")
    parser.add_argument("--repeats", type=positive, default=3, help="turns that count (default: %(default)s)")
    parser.add_argument("--num-pages", type=positive, help="pages of KV (default: as many as the engine chooses)")
    parser.add_argument("--commit", help="the commit to record (default: the one that git reports)")
    parser.add_argument("--output", type=Path, help="write the result to this JSON file")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="nanovllm-constrained-") as made:
        model = str(shape_folder(options.model, Path(made))) if options.model in SHAPES else options.model
        llm = nv.LLM(model, device=options.device, num_pages=options.num_pages, max_num_seqs=options.rows)
    workload = options.rows, options.max_tokens, options.repeats, options.strings
    each = measure(llm, *workload)
    rates = {name: statistics.median(rates) for name, rates in each.items()}
    told = [
        "python -m benchmarks.constrained",
        f"--model {options.model} --strings {options.strings} --rows {options.rows} --max-tokens {options.max_tokens}",
    ]
    result = {
        **record(replace(llm.model, name=options.model), {}, " ".join(told), options.commit),
        "rows": options.rows,
        "max_tokens": options.max_tokens,
        "tok_s": {name: rates[name] for name in WORKLOADS},
        **{name: rates[name] for name in TIMES},
        "each": each,
        "json_share": round(rates["json"] / rates["free"], 3),
        "free_beside": round(rates["both"] / rates["free"], 3),
    }
    print(json.dumps({key: result[key] for key in ("tok_s", *TIMES, "json_share", "free_beside")}))
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
