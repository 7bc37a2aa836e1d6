"""The text that a model is checked on: passages of several kinds, or random tokens for a model without a tokenizer."""

import torch

from nanovllm.models.model import Model

TEXT = """\
The harbour woke before the sun did. Two fishermen untied their boat, counted the nets, and rowed out past the old stone wall, where the
water changes its colour from green to grey. "You should have slept," said the elder. "So should the fish," answered his brother, and they
laughed until the first gulls came. By noon they had sold 47 kilograms of mackerel at 3.20 a kilogram, which makes 150.40, and paid for
the rope that they had borrowed in March.

A gas that is compressed grows warm, because work is done on it; where the same gas expands into an empty vessel, no work is done, and an
ideal one keeps its temperature. Real gases cool a little as their molecules part: the effect that Joule and Thomson measured in 1852.

def mean(values: list[float]) -> float:
    if not values:
        raise ValueError("mean of nothing")
    return sum(values) / len(values)

- Preheat the oven to 180 °C (350 °F).
- Mix 250 g of flour with a pinch of salt; add the butter, cold and in cubes.
- Bake for 35 to 40 minutes, or until the crust is golden.

Le chat dort sur la chaise, et dehors il pleut. Der Zug nach Graz fährt um 18:05 von Gleis 7 ab. ¿Dónde está la biblioteca?

The council met on Tuesday to vote on the bridge. Nobody disputed that the old one must go; what divided the room was whether the new one
should carry cars at all. "A bridge is a promise to the other bank," said the mayor, "and we do not break it by walking." The motion passed
by nine votes to six, with two members absent.
"""


def sample_tokens(model: Model, count: int) -> list[int]:
    """`count` tokens of the text, repeated if it is too short."""
    if model.tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(model.config.vocab_size, (count,), generator=generator).tolist()
    ids = model.tokenizer.encode(TEXT)
    return (ids * -(-count // len(ids)))[:count]
