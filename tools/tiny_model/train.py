"""Train the packaged tiny model on generated text, in less than 15 minutes on one H200.

    python -m tools.tiny_model.train --out src/nanovllm/assets/tiny --work /tmp/tiny      # the whole training; run again to resume

The text, its order and the initial weights depend only on --seed. Worker processes generate the text while the GPU trains. Checkpoints are
written to --work, and a run continues from a checkpoint in that folder. On a machine without a GPU use --toy, which runs every part.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

STEPS, TOKENS_PER_STEP = 12000, 131072
SHORT, LONG = 512, 2048


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the Hugging Face folder to write")
    parser.add_argument("--work", type=Path, required=True, help="folder for the checkpoint and the loss log")
    parser.add_argument("--init", type=Path, default=None, help="a folder with weights to start from instead of random weights")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--tokens-per-step", type=int, default=TOKENS_PER_STEP)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 3) - 2))
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of the matrices (Muon)")
    parser.add_argument("--adam-lr", type=float, default=0.006, help="learning rate of embeddings and norms (AdamW)")
    parser.add_argument(
        "--minutes",
        type=float,
        default=14.0,
        help="time limit: if the steps would take longer, the last steps are left out and the learning rate falls sooner",
    )
    parser.add_argument("--checkpoint-every", type=int, default=1000)
    parser.add_argument("--toy", action="store_true", help="a few small steps, for a machine without a GPU")
    args = parser.parse_args()
    if args.toy:
        args.steps, args.tokens_per_step, args.workers = min(args.steps, 6), 4 * LONG, 1
    return args


class BatchMaker:
    """Generates the batch of a step; every worker process has one."""

    def __init__(self, tokenizer_file: str, seed: int, tokens_per_step: int):
        self.tokenizer_file, self.seed, self.tokens_per_step = tokenizer_file, seed, tokens_per_step
        self.tokenizer = None

    def __call__(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the batch of a step: odd steps have long rows, even steps short rows, with the same number of tokens."""
        from tokenizers import Tokenizer

        from tools.tiny_model.pack import draw_batch

        if self.tokenizer is None:
            self.tokenizer = Tokenizer.from_file(self.tokenizer_file)
        length = LONG if step % 2 else SHORT
        return draw_batch(self.tokenizer, self.seed, step, self.tokens_per_step // length, length)


def _work(step: int) -> tuple[np.ndarray, np.ndarray]:
    return _work.maker(step)  # type: ignore[attr-defined]


def _start_worker(maker: BatchMaker) -> None:
    _work.maker = maker  # type: ignore[attr-defined]


def make_tokenizer(folder: Path, seed: int, documents: int) -> None:
    """Train the tokenizer on the text of the seed, unless the folder has one."""
    if (folder / "tokenizer.json").exists():
        return
    from tools.tiny_model.text.documents import sample_texts
    from tools.tiny_model.tokenizer import save_tokenizer, train_tokenizer

    save_tokenizer(train_tokenizer(sample_texts(seed, documents)), folder)


def learning_rate(step: int, steps: int) -> float:
    """Return the share of the full learning rate: a short rise, a plateau, then a fall to zero over the last 60% of the steps."""
    return min(1.0, (step + 1) / 100, (steps - step) / (0.6 * steps))


def train(args: argparse.Namespace, batches: Iterator[tuple[np.ndarray, np.ndarray]], start: int, checkpoint: dict | None) -> None:
    """Run the training loop from step `start`, and write the folder at the end."""
    import torch
    from tqdm import tqdm

    from tools.tiny_model.net import CONFIG, Muon, TinyModel, load_model, save_model, weighted_loss

    begun = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    model = TinyModel(CONFIG).to(device)
    if args.init:
        load_model(model, args.init)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    muon = Muon(matrices, weight_decay=0.05)
    adam = torch.optim.AdamW(others, lr=args.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=device.type == "cuda")
    log: list[dict] = []
    spent = 0.0
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
        adam.load_state_dict(checkpoint["adam"])
        for buffer, saved in zip(muon.momenta, checkpoint["momenta"], strict=True):
            buffer.copy_(saved)
        log, spent = checkpoint["log"], checkpoint["seconds"]
    loss_of = torch.compile(weighted_loss, dynamic=False) if device.type == "cuda" else weighted_loss
    bar = tqdm(range(start, args.steps), initial=start, total=args.steps, desc="training", mininterval=5.0, smoothing=0.05)
    waited, end, cut, losses = 0.0, args.steps, None, []
    timed = (time.monotonic(), start)
    for step in bar:
        if step >= end:
            break
        waiting = time.monotonic()
        tokens, weights = next(batches)
        waited += time.monotonic() - waiting
        ids = torch.from_numpy(tokens.astype(np.int32)).pin_memory() if device.type == "cuda" else torch.from_numpy(tokens.astype(np.int32))
        ids = ids.to(device, non_blocking=True).long()
        marks = torch.from_numpy(weights).to(device, non_blocking=True).float()
        share = learning_rate(step, args.steps) if cut is None else cut[1] * (end - step) / (end - cut[0])
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(model, ids, marks)
        loss[0].backward()
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        for group in adam.param_groups:
            group["lr"] = args.adam_lr * share
        muon.step(args.lr * share, momentum=0.85 + 0.1 * min(1.0, step / 300))
        adam.step()
        model.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if (step + 1) % 20 == 0 or step + 1 == end:
            text, answers = torch.stack(losses).mean(0).tolist()  # waits for the GPU
            losses.clear()
            now = time.monotonic()
            log.append({"step": step + 1, "loss": text, "answers": answers, "seconds": spent + now - begun})
            bar.set_postfix(loss=f"{text:.3f}", answers=f"{answers:.3f}", waited=f"{waited:.0f}s", refresh=False)
            if step + 1 >= start + 200 and cut is None:
                if timed[1] == start:
                    timed = (now, step + 1)
                elif now - timed[0] > 5:
                    pace = (now - timed[0]) / (step + 1 - timed[1])
                    room = int((args.minutes * 60 - (now - begun)) / pace)
                    if room < 0.5 * (args.steps - step) or (room < args.steps - step - 1 and learning_rate(step, args.steps) < 1):
                        end, cut = step + 1 + max(room, 1), (step + 1, share)
                        tqdm.write(f"time is short: ends at step {end}")
        if (step + 1) % args.checkpoint_every == 0:
            state = {"model": model.state_dict(), "adam": adam.state_dict(), "momenta": muon.momenta, "step": step + 1, "log": log,
                     "seconds": spent + time.monotonic() - begun}  # fmt: skip
            torch.save(state, args.work / "checkpoint.tmp")
            os.replace(args.work / "checkpoint.tmp", args.work / "checkpoint.pt")
    bar.close()
    save_model(model, args.out)
    seconds = spent + time.monotonic() - begun
    summary = {
        "steps": end,
        "tokens": end * args.tokens_per_step,
        "seconds": round(seconds),
        "waited_for_text": round(waited, 1),
        "seed": args.seed,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    (args.work / "training.json").write_text(json.dumps({**summary, "log": log}) + "\n")
    print(
        f"trained {end} steps of {args.tokens_per_step} tokens in {seconds:.0f} s (waited {waited:.0f} s for text), "
        f"loss {log[-1]['loss'] if log else 0:.4f}"
    )


def main() -> None:
    """Make the tokenizer, start the worker processes, and train."""
    args = parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    print(f"{args.steps} steps of {args.tokens_per_step} tokens; takes less than 15 minutes on one H200", flush=True)
    begun = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.init:
        make_tokenizer(args.out, args.seed, 2000 if args.toy else 30000)
    print(f"tokenizer ready after {time.monotonic() - begun:.0f} s", flush=True)
    if args.init:
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copyfile(args.init / file, args.out / file)
    maker = BatchMaker(str(args.out / "tokenizer.json"), args.seed, args.tokens_per_step)
    # The workers start before PyTorch is imported, so that they use little memory and no threads exist at the fork.
    pool = multiprocessing.get_context("spawn").Pool(args.workers, _start_worker, (maker,))
    start, checkpoint = 0, None
    if (args.work / "checkpoint.pt").exists():
        import torch

        checkpoint = torch.load(args.work / "checkpoint.pt", map_location="cpu")
        start = checkpoint["step"]
        print(f"goes on from step {start}")
    try:
        train(args, pool.imap(_work, range(start, args.steps)), start, checkpoint)
    finally:
        pool.terminate()


if __name__ == "__main__":
    main()
