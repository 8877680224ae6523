"""Which kv_tiles a q_tile sees, and where only a part of a tile is seen.

Row tiles and kv_tiles are counted from the chunk's first row; cached tokens before it lie in
negative kv_tiles. The *distance* of a row tile from a kv_tile is the difference of their numbers.
Row p of the one sees key q of the other if 0 <= 128 * distance + p - q < window.
"""

from dataclasses import dataclass
from functools import cached_property

from ...backend import nisa, nl
from ...sizes import PARTITIONS

FARTHEST = 2**30
"""A distance that no chunk has."""


@dataclass(frozen=True)
class Band:
    """Causal attention, within a window or without (None); or every row sees every key."""

    window: int | None
    causal: bool = True

    @cached_property
    def reach(self) -> int:
        """Largest distance at which anything is seen."""
        return FARTHEST if self.window is None else (self.window + PARTITIONS - 2) // PARTITIONS

    @cached_property
    def edge(self) -> int:
        """Smallest distance at which the window hides some key from some row."""
        return FARTHEST if self.window is None else self.window // PARTITIONS

    def sees(self, distance: int) -> bool:
        """Whether any row sees any key."""
        return 0 <= distance <= self.reach

    def is_cut(self, distance: int) -> bool:
        """Whether some row does not see some key of a tile that is seen."""
        return self.causal and (distance == 0 or distance >= self.edge)

    def cut_distances(self) -> list[int]:
        """Those at which a tile is seen in part: at most three."""
        if not self.causal:
            return []
        edges = range(max(1, self.edge), self.reach + 1) if self.edge < FARTHEST else ()
        return [0, *edges]

    def select(
        self,
        tile: nl.NkiTensor,  # [128, n * 128] SBUF, changed in place
        distance: int,
        keys_on_partitions: bool,  # else queries
        otherwise: float,
    ) -> None:
        """Replace what is not seen in tiles side by side, all at one distance."""
        sign = -1 if keys_on_partitions else 1
        num = tile.shape[1] // PARTITIONS
        if distance == 0:
            # p - q >= 0
            nisa.affine_select(
                dst=tile, pattern=[[0, num], [-sign, PARTITIONS]], channel_multiplier=sign,
                on_true_tile=tile, on_false_value=otherwise, cmp_op=nl.greater_equal,
            )  # fmt: skip
        if distance >= self.edge:
            assert self.window is not None
            # window - 1 - 128 * distance - (p - q) >= 0
            nisa.affine_select(
                dst=tile, pattern=[[0, num], [sign, PARTITIONS]], channel_multiplier=-sign,
                offset=self.window - 1 - distance * PARTITIONS, on_true_tile=tile,
                on_false_value=otherwise, cmp_op=nl.greater_equal,
            )  # fmt: skip
