"""Say what quantised weights and KV cost: right answers of the packaged model, and how far layers and predictions move.

    python -m benchmarks.formats --output benchmarks/results/formats.json

Every format runs in bfloat16, so that it differs from `bfloat16` by its weights or its KV alone. Recall is the share of right answers by
greedy replies, over cases of `tools/tiny_model/score.py` that ask for a fact of the context. Each case is asked of every format, so the
uncertainty of a difference comes from the cases in which the two formats differ.

The other figures are those of `nanovllm check --against`, in float64: the error of the worst layer, the mean divergence of the next
tokens' probabilities in nats, and the share of places where the most probable token is the same. The packaged model reads a text of the
kind that it was trained on; models with random weights and the widths of published ones read random tokens.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

import nanovllm as nv
from nanovllm.entrypoints.cli.bench.environment import record
from nanovllm.entrypoints.cli.bench.model_shapes import SHAPES, random_model
from nanovllm.entrypoints.display.terminal import note
from nanovllm.loading.quantisation.rounding import require_rounding, rounded_params
from nanovllm.models.check.cost import cost
from nanovllm.models.check.sample_text import sample_tokens
from tools.tiny_model.score import TINY, draw_cases
from tools.tiny_model.text.cases import MEASURES, Prompter, judge

BASE = "bfloat16"
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"}, BASE: {}, "fp8": {"quantization": "fp8"}, "int8": {"quantization": "int8"},
    "int8, head too": {"quantization": "int8", "quantize_head": True}, "int4": {"quantization": "int4"},
    "int4, head too": {"quantization": "int4", "quantize_head": True}, "fp8 KV": {"kv_dtype": "fp8"},
}  # fmt: skip
RECALL = ("one_fact", "eight_facts", "far_fact", "second_turn", "who_did_what")  # the keys of the measures
WIDTHS = {"qwen3-0.6b": 4, "tinyllama-1.1b": 4, "qwen3-30b-a3b": 2}  # shapes, and how many of their layers
VOCABULARY, EXPERTS = 32768, 16  # at most, of those shapes: a few gigabytes of memory, and a minute
SHAPE_TOKENS = 256


def answers(options: Mapping[str, Any], share: float) -> dict[str, list[bool]]:
    """Whether each answer is right, by measure."""
    llm = nv.LLM("tiny", device="cpu", max_num_seqs=32, **{"dtype": BASE, **options})
    prompter, right = Prompter(AutoTokenizer.from_pretrained(TINY)), dict[str, list[bool]]()
    for measure in MEASURES:
        if measure.key in RECALL:
            cases = draw_cases(prompter, measure.key, 0, max(2, round(measure.count * share)))
            most = max(case.max_tokens for case in cases)
            replies = llm.generate([case.prompt for case in cases], nv.SamplingParams(temperature=0, max_tokens=most))
            right[measure.title] = [judge(case, reply.text) for case, reply in zip(cases, replies, strict=True)]
    return right


def recall(right: Mapping[str, Sequence[bool]], base: Mapping[str, Sequence[bool]]) -> dict[str, Any]:
    """The share of right answers, and its distance from that of `base` in points with a standard error, over the same cases."""
    moved = [int(a) - int(b) for title, each in right.items() for a, b in zip(each, base[title], strict=True)]
    count, mean = len(moved), sum(moved) / len(moved)
    error = ((sum(each * each for each in moved) / count - mean * mean) / count) ** 0.5
    return {
        "recall": round(sum(map(sum, right.values())) / count, 4),
        "cases": count,
        "points": round(100 * mean, 2),
        "points_error": round(100 * error, 2),
        "changed": sum(map(abs, moved)),
        "by_measure": {title: round(sum(each) / len(each), 4) for title, each in right.items()},
    }


def moves(model: nv.Model, reference: nv.Model, token_ids: Sequence[int]) -> dict[str, Any]:
    """What the weights of `model` cost beside those of `reference`."""
    found = cost(model, reference, token_ids)
    return {
        "bytes": found.bytes, "worst_layer": round(max(found.layers), 5), "divergence": round(found.divergence, 6),
        "same_tokens": found.agreement, "tokens": found.num_tokens,
    }  # fmt: skip


def packaged(names: Sequence[str], share: float) -> dict[str, Any]:
    """The figures of the packaged model, by format."""
    prompter = Prompter(AutoTokenizer.from_pretrained(TINY))
    text = prompter.tokenizer.encode(draw_cases(prompter, "far_fact", 1, 1)[0].prompt)
    reference, base = nv.load_model("tiny", "cpu", BASE), answers(FORMATS[BASE], share)
    figures = dict[str, Any]()
    for name in names:
        options = {"dtype": BASE, **FORMATS[name]}
        figures[name] = recall(base if name == BASE else answers(FORMATS[name], share), base)
        if "kv_dtype" not in options:
            figures[name] |= moves(nv.load_model("tiny", "cpu", **options), reference, text)
        note(f"{name}: {json.dumps(figures[name])}")
    return figures


def random_shapes(shapes: Mapping[str, int], names: Sequence[str]) -> dict[str, Any]:
    """The figures of random weights, by shape and format."""
    figures = dict[str, Any]()
    for shape, num_layers in shapes.items():
        config = replace(SHAPES[shape], num_layers=num_layers, vocab_size=min(VOCABULARY, SHAPES[shape].vocab_size))
        if config.moe is not None:
            config = replace(config, moe=replace(config.moe, num_experts=EXPERTS, layers=tuple(range(num_layers))))
        reference = random_model(shape, config, device="cpu", dtype=BASE)
        for name in names:
            rounding = require_rounding(FORMATS[name].get("quantization"), FORMATS[name].get("quantize_head", False))
            if rounding is not None:
                rounded = replace(reference, params=rounded_params(reference.params, rounding), quantization=rounding.summary)
                found = moves(rounded, reference, sample_tokens(reference, SHAPE_TOKENS))
                figures.setdefault(shape, {"layers": num_layers, "formats": {}})["formats"][name] = found
                note(f"{shape}, {name}: {json.dumps(found)}")
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=1.0, help="share of the cases of each measure (default: %(default)s)")
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=list(FORMATS), help="which formats (default: all)")
    parser.add_argument("--shapes", nargs="*", choices=WIDTHS, default=list(WIDTHS), help="which random shapes (default: all)")
    parser.add_argument("--commit", help="the commit to record (default: the one that git reports)")
    parser.add_argument("--output", type=Path, help="write the result to this JSON file")
    options = parser.parse_args(arguments)
    shapes = random_shapes({name: WIDTHS[name] for name in options.shapes}, options.formats)
    figures = {"formats": packaged(options.formats, options.share), "shapes": shapes}
    if options.output is not None:
        made = record(nv.load_model("tiny", "cpu", BASE), figures, "python -m benchmarks.formats", options.commit)
        options.output.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
