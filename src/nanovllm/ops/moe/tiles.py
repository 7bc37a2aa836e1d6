"""Tile configurations of the kernels for mixtures of experts."""

from dataclasses import dataclass

from nanovllm.ops.linear.quantised_tiles import FewTile, ManyTile
from nanovllm.ops.linear.tiles import Tile, WideTile


@dataclass(frozen=True, slots=True, kw_only=True)
class FewTiles:
    """Tile configurations of the gate-and-up product and the down product, for kernels that run each pair of token and expert alone."""

    gate_up: Tile
    down: Tile


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedTiles:
    """Tile configurations for pairs that are sorted by expert and grouped into blocks. `gate_up.rows` and `down.rows` are equal."""

    gate_up: WideTile
    down: WideTile


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedFewTiles:
    """As `FewTiles`, for quantised experts."""

    gate_up: FewTile
    down: FewTile


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedGroupedTiles:
    """As `GroupedTiles`, for quantised experts. `gate_up.rows` and `down.rows` are equal, and `parts` is 1 in both."""

    gate_up: ManyTile
    down: ManyTile
