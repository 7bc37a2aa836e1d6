"""Tile configurations of the kernels for mixtures of experts."""

from dataclasses import dataclass

from nanovllm.ops.linear.tiles import Tile, WideTile


@dataclass(frozen=True, slots=True, kw_only=True)
class FewTiles:
    """Every pair of a token and an expert by itself: how the products with gate and up, and with down, are cut."""

    gate_up: Tile
    down: Tile


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedTiles:
    """Pairs sorted by expert, in blocks of `gate_up.rows`, which are `down.rows`: how the products of a block are cut."""

    gate_up: WideTile
    down: WideTile
