"""What quantised weights cost, as text: the errors of the layers, and the predictions over the text."""

from nanovllm.entrypoints.display.tables import aligned
from nanovllm.models.check.cost import Cost

ACROSS = 8  # layers in a line


def cost_text(cost: Cost) -> str:
    """The figures in aligned columns, the sentences about predictions last."""
    lines = [cost.layers[first : first + ACROSS] for first in range(0, len(cost.layers), ACROSS)]
    rows = [(f"{ACROSS * place}", *(f"{error:.2%}" for error in line), *("",) * (ACROSS - len(line))) for place, line in enumerate(lines)]
    how = cost.quantization or "not quantised"
    perplexity = f"perplexity {cost.perplexity:.4g}, was {cost.reference_perplexity:.4g}"
    if not cost.knows_text:
        perplexity = f"no perplexity: {cost.reference} predicts this text worse than chance, so it would say nothing"
    known = f"{cost.reference} does not know text of this kind: text that it was trained on may give other figures."
    figures = 'Those of the packaged model are in docs/reference/figures.md, "What each format costs".'
    return "\n".join(
        [
            f"{cost.model} ({how}, {cost.bytes / 1e6:,.1f} MB of weights) beside {cost.reference} ({cost.reference_bytes / 1e6:,.1f} MB)",
            f"Distance of each layer's output, of what the layer adds to its input, over {cost.num_tokens} tokens in float64:",
            "",
            *aligned(("layer", *(f"+{place}" for place in range(ACROSS))), rows, left=()),
            "",
            f"Next tokens: divergence {cost.divergence:.2g} nats per token, at most {cost.worst_divergence:.2g}; the same most probable "
            f"token at {cost.agreement} of {cost.num_tokens} places; {perplexity}",
            *(() if cost.knows_text else (f"{known} {figures}",)),
        ]
    )
