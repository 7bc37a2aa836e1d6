"""Measure the tiny model's recall, sums and stories with greedy decoding, by transformers or by nanovllm.

    python -m tools.tiny_model.score                              # print the table, by transformers
    python -m tools.tiny_model.score --engine nanovllm            # the same by our engine
    python -m tools.tiny_model.score --card --report              # also writes the model card and docs/explanation/tiny-model.md
"""

import argparse
import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from zlib import crc32

from tqdm import tqdm

from tools.tiny_model.text.cases import MEASURES, Case, Prompter, final_answer, judge, loops, story_prompts
from tools.tiny_model.text.grammar import Rng

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "src/nanovllm/assets/tiny"
Generate = Callable[[Sequence[str], int], list[str]]


def by_transformers(model_folder: Path, device: str, batch_size: int) -> Generate:
    """Generate greedy text with transformers' `generate`, in bfloat16 on a GPU and in float32 on a CPU."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder, padding_side="left")
    model = (
        AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16 if device == "cuda" else torch.float32).to(device).eval()
    )

    def generate(prompts: Sequence[str], max_tokens: int) -> list[str]:
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        texts = [""] * len(prompts)
        for at in range(0, len(order), batch_size):
            some = order[at : at + batch_size]
            inputs = tokenizer([prompts[i] for i in some], return_tensors="pt", padding=True, return_token_type_ids=False).to(device)
            with torch.no_grad():
                out = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False, temperature=None, top_k=None, top_p=None)
            for i, ids in zip(some, out[:, inputs["input_ids"].shape[1] :], strict=True):
                texts[i] = tokenizer.decode(ids)
        return texts

    return generate


def by_nanovllm(model_folder: Path, device: str, batch_size: int) -> Generate:
    """Greedy text through nanovllm's LLM."""
    import nanovllm as nv

    llm = nv.LLM(str(model_folder), device=device, max_num_seqs=batch_size)

    def generate(prompts: Sequence[str], max_tokens: int) -> list[str]:
        return [out.text for out in llm.generate(list(prompts), nv.SamplingParams(temperature=0.0, max_tokens=max_tokens))]

    return generate


def draw_cases(prompter: Prompter, key: str, seed: int, count: int) -> list[Case]:
    """The cases of one measure; a seed gives the same ones everywhere."""
    measure = next(m for m in MEASURES if m.key == key)
    rng = Rng(crc32(f"{key}/{seed}".encode()))
    return [measure.draw(rng, prompter) for _ in range(count)]


def score(generate: Generate, prompter: Prompter, seed: int, share: float) -> dict:
    """Return each measure's share of right answers and its first five cases, and the stories."""
    results: dict = {}
    for measure in tqdm(MEASURES, desc="scoring"):
        cases = draw_cases(prompter, measure.key, seed, max(5, round(measure.count * share)))
        texts = generate([case.prompt for case in cases], max(case.max_tokens for case in cases))
        right = [judge(case, text) for case, text in zip(cases, texts, strict=True)]
        rows = [
            {"prompt": c.prompt, "expected": c.value, "text": t, "answer": final_answer(t, c.prompt), "right": r}
            for c, t, r in zip(cases, texts, right, strict=True)
        ]
        results[measure.key] = {"title": measure.title, "goal": measure.goal, "count": len(cases), "share": sum(right) / len(right),
                                "samples": rows[:5],
                                "wrong": [row for row in rows if not row["right"]][:12]}  # fmt: skip
    prompts = story_prompts(max(5, round(50 * share)), seed)
    texts = generate(prompts, 420)
    stories = [
        {"prompt": p, "text": t.split("<|endoftext|>")[0], "ended": "<|endoftext|>" in t, "loops": loops(p + t)}
        for p, t in zip(prompts, texts, strict=True)
    ]
    results["stories"] = {
        "count": len(stories),
        "ended": sum(s["ended"] for s in stories),
        "looping": sum(s["loops"] for s in stories),
        "all": stories,
    }
    return results


def table(results: dict, engine: str) -> str:
    """The results as a Markdown table."""
    lines = [f"| measure (greedy, {engine}) | cases | goal | right |", "| --- | --- | --- | --- |"]
    for measure in MEASURES:
        r = results[measure.key]
        lines.append(f"| {r['title']} | {r['count']} | {format(r['goal'], '.0%') if r['goal'] else '-'} | {r['share']:.1%} |")
    s = results["stories"]
    lines.append(f"| stories that end by themselves (420 tokens) | {s['count']} | - | {s['ended'] / s['count']:.0%} |")
    trailing = sum("Question:" in story["text"] for story in s["all"])
    lines.append(f"| stories that go on with questions after their ending | {s['count']} | - | {trailing} |")
    lines.append(f"| stories with a loop (eight words or a sentence twice, or a word doubled) | {s['count']} | 0 | {s['looping']} |")
    return "\n".join(lines)


def put_between(path: Path, mark: str, text: str) -> None:
    """Replace the text between `<!-- mark -->` and `<!-- /mark -->` in the file."""
    whole = path.read_text()
    begin, end = f"<!-- {mark} -->\n", f"\n<!-- /{mark} -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if not pattern.search(whole):
        raise SystemExit(f"{path} has no marks {begin!r} and {end!r}")
    path.write_text(pattern.sub(lambda _: begin + text + end, whole))


def samples(results: dict) -> str:
    """Return the first five cases of every measure and the first five stories, without selection."""
    out = []
    for measure in MEASURES:
        out.append(f"### {results[measure.key]['title'].capitalize()}")
        for row in results[measure.key]["samples"]:
            prompt = row["prompt"]
            if len(prompt) > 1500:
                prompt = f"{prompt[:700]}\n\n[... other text ...]\n\n{prompt[-300:]}"
            answer, verdict = row["text"].replace("<|endoftext|>", "").rstrip(), "right" if row["right"] else "wrong"
            out.append(f"Expected `{row['expected']}`, {verdict}:\n\n````text\n{prompt}⏵{answer}\n````")
    out.append("### Stories")
    out += [f"````text\n{s['prompt']}⏵{s['text']}\n````" for s in results["stories"]["all"][:5]]
    return "\n\n".join(out)


def write(results: dict, args: argparse.Namespace) -> None:
    """Print the table, and write it to the files that the options name."""
    text = table(results, args.engine)
    print(text)
    if args.card:
        put_between(args.model / "README.md", "scores", text)
    if args.report:
        put_between(ROOT / "docs/explanation/tiny-model.md", "scores", text)
        put_between(ROOT / "docs/explanation/tiny-model.md", "samples", samples(results))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TINY)
    parser.add_argument("--engine", choices=("transformers", "nanovllm"), default="transformers")
    parser.add_argument("--device", default=None, help="cuda or cpu (default: cuda if there is a GPU)")
    parser.add_argument("--batch-size", type=int, default=None)
    parser.add_argument("--share", type=float, default=1.0, help="share of the cases to run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None, help="write all results to this file")
    parser.add_argument("--results", type=Path, default=None, help="read results from a file of --json instead of measuring")
    parser.add_argument("--card", action="store_true", help="write the table into the model's README.md")
    parser.add_argument("--report", action="store_true", help="write table and samples into docs/explanation/tiny-model.md")
    args = parser.parse_args()
    if args.results:
        write(json.loads(args.results.read_text()), args)
        return
    import torch
    from transformers import AutoTokenizer

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    make = by_transformers if args.engine == "transformers" else by_nanovllm
    generate = make(args.model, device, args.batch_size or (256 if device == "cuda" else 16))
    begun = time.monotonic()
    results = score(generate, Prompter(AutoTokenizer.from_pretrained(args.model)), args.seed, args.share)
    print(f"took {time.monotonic() - begun:.0f} s")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    write(results, args)


if __name__ == "__main__":
    main()
