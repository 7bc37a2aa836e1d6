"""Plot the loss of a training from the logs that train.py writes to its --work folder.

    python -m tools.tiny_model.plot_loss docs/explanation/tiny-model-loss.png first/training.json second/training.json
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def main() -> None:
    """Plot the stages of training one after another, over the number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("logs", type=Path, nargs="+")
    args = parser.parse_args()
    fig, axes = plt.subplots(figsize=(8, 4), dpi=110, layout="constrained")
    offset, seconds = 0.0, 0
    for i, path in enumerate(args.logs):
        run = json.loads(path.read_text())
        per_step = run["tokens"] / run["steps"] / 1e9
        at = [offset + row["step"] * per_step for row in run["log"]]
        for key, colour, label in (("loss", "tab:blue", "all tokens, weighted"), ("answers", "tab:orange", "tokens of answers")):
            axes.plot(at, [row[key] for row in run["log"]], color=colour, linewidth=1.0, label=label if i == 0 else None)
        if i:
            axes.axvline(offset, color="grey", linewidth=0.8, linestyle=":")
        offset, seconds = at[-1], seconds + run["seconds"]
    axes.set(xlabel="billion tokens", ylabel="loss (nats a token, log scale)", yscale="log")
    axes.set_title(f"Training of the tiny model: {seconds} s on one H200")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    fig.savefig(args.picture)


if __name__ == "__main__":
    main()
