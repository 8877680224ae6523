"""Which key tiles a row tile sees, and where only a part of a tile is seen.

Row and key tiles are counted from the chunk's first row; cached tokens before it lie in negative
key tiles. The *distance* of a row tile from a key tile is the difference of their numbers. Row p of
the one sees key q of the other if 0 <= 128 * distance + p - q < window.
"""

from ...backend import nisa, nl
from ...sizes import PARTITIONS

FARTHEST = 2**30
"""A distance that no chunk has."""


class Band(nl.NKIObject):
    """Causal attention, within a window or without (None)."""

    def __init__(self, window: int | None) -> None:
        self.window = 0
        # Largest distance at which anything is seen, smallest at which not every key is.
        self.reach = FARTHEST
        self.edge = FARTHEST
        if window is not None:
            self.window = window
            self.reach = (window + PARTITIONS - 2) // PARTITIONS
            self.edge = window // PARTITIONS

    def sees(self, distance: int) -> bool:
        """Whether any row sees any key."""
        return distance >= 0 and distance <= self.reach

    def is_cut(self, distance: int) -> bool:
        """Whether some row does not see some key of a tile that is seen."""
        return distance == 0 or distance >= self.edge

    def cut_distances(self) -> list[int]:
        """Those at which a tile is seen in part: at most three."""
        found = [0]
        if self.edge < FARTHEST:
            for distance in range(max(1, self.edge), self.reach + 1):
                found.append(distance)
        return found

    def select(
        self,
        tile: nl.NkiTensor,  # [128, n * 128] SBUF, changed in place
        distance: int,
        num: int,
        keys_on_partitions: bool,  # else rows
        otherwise: float,
    ) -> None:
        """Replace what is not seen in `num` tiles side by side, all at one distance."""
        sign = 1
        if keys_on_partitions:
            sign = -1
        if distance == 0:
            # p - q >= 0
            nisa.affine_select(
                dst=tile, pattern=[[0, num], [-sign, PARTITIONS]], channel_multiplier=sign,
                on_true_tile=tile, on_false_value=otherwise, cmp_op=nl.greater_equal,
            )  # fmt: skip
        if distance >= self.edge:
            # window - 1 - 128 * distance - (p - q) >= 0
            nisa.affine_select(
                dst=tile, pattern=[[0, num], [sign, PARTITIONS]], channel_multiplier=-sign,
                offset=self.window - 1 - distance * PARTITIONS, on_true_tile=tile,
                on_false_value=otherwise, cmp_op=nl.greater_equal,
            )  # fmt: skip
