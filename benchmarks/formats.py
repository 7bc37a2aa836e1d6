"""Say what quantised weights and KV cost the packaged model: its recall, and how far its layers and tokens move.

    python -m benchmarks.formats --output benchmarks/results/formats.json

Recall is the share of right answers by greedy replies, over cases of `tools/tiny_model/score.py` that ask for a fact of the context. The
other figures are those of `nanovllm check --against tiny`: the relative error of the worst layer and the mean divergence of probabilities
(nats per token), both in float64, and the tokens of 256 that are the same.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

import nanovllm as nv
from nanovllm.entrypoints.cli.bench.environment import record
from nanovllm.entrypoints.cli.main import main as command_line
from tools.tiny_model.score import draw_cases
from tools.tiny_model.text.cases import MEASURES, Prompter, judge

FORMATS: dict[str, dict[str, Any]] = {
    "float32": {}, "bfloat16": {"dtype": "bfloat16"}, "fp8": {"quantization": "fp8"}, "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"}, "fp8 KV": {"kv_dtype": "fp8"},
}  # fmt: skip
RECALL = ("one_fact", "eight_facts", "far_fact", "second_turn", "who_did_what")  # the keys of the measures


def recall(options: dict[str, Any], share: float) -> dict[str, Any]:
    """The share of right answers of each measure, and of all cases together."""
    llm, right, count, found = nv.LLM("tiny", device="cpu", max_num_seqs=32, **options), 0, 0, dict[str, float]()
    prompter = Prompter(AutoTokenizer.from_pretrained(Path(nv.__file__).parent / "assets/tiny"))
    for measure in MEASURES:
        if measure.key not in RECALL:
            continue
        cases = draw_cases(prompter, measure.key, 0, max(5, round(measure.count * share)))
        most = max(case.max_tokens for case in cases)
        replies = llm.generate([case.prompt for case in cases], nv.SamplingParams(temperature=0, max_tokens=most))
        good = sum(judge(case, reply.text) for case, reply in zip(cases, replies, strict=True))
        found[measure.title], right, count = round(good / len(cases), 4), right + good, count + len(cases)
    return {"recall": round(right / count, 4), "cases": count, "by_measure": found}


def cost(kind: str, folder: Path) -> dict[str, Any]:
    """What `nanovllm check` says of the packaged model with rounded weights."""
    file = folder / f"{kind}.json"
    command_line(["check", "tiny", "--device", "cpu", "--quantization", kind, "--against", "tiny", "--output", str(file)])
    told = json.loads(file.read_text())["cost"]
    return {
        "bytes": told["bytes"], "worst_layer": round(max(told["layers"]), 4), "divergence": round(told["divergence"], 4),
        "same_tokens": told["agreement"],
    }  # fmt: skip


def main() -> None:
    """Run the command line."""
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=0.5, help="share of the cases of each measure (default: %(default)s)")
    parser.add_argument("--commit", help="the commit to record (default: the one that git reports)")
    parser.add_argument("--output", type=Path, help="write the result to this JSON file")
    options = parser.parse_args()
    formats = dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        for name, given in FORMATS.items():
            kind = given.get("quantization")
            formats[name] = recall(given, options.share) | (cost(kind, Path(folder)) if kind else {})
            print(name, json.dumps(formats[name]), flush=True)
    if options.output is not None:
        made = record(nv.load_model("tiny", "cpu"), {"formats": formats}, "python -m benchmarks.formats", options.commit)
        options.output.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
