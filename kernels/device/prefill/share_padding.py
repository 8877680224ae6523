"""Shares that lie beyond the real rows of a chunk: left out at run time, their result is zero."""

from collections.abc import Callable

from ...backend import nisa, nl
from ...sizes import PARTITIONS
from ..loading import row_tile_view, runs_of
from ..tile_schedule import Share

Body = Callable[[nisa.VirtualRegister | int], None]

ZERO_TILES = 8
"""Row tiles of one head that one store of zeros covers."""


def real_rows(num_tokens: nl.NkiTensor, share: Share) -> nl.NkiTensor:
    """[128, 1] fp32: 1.0 if a share has any of the `num_tokens` [128, 1] real rows, else 0.0."""
    is_real = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=is_real, data=num_tokens, op0=nl.greater,
        operand0=float(share.row_tiles[0] * PARTITIONS),
    )  # fmt: skip
    return is_real


def as_flag(is_real: nl.NkiTensor) -> nl.NkiTensor:
    """The number of real_rows as [1, 1] int32."""
    flag = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=flag, src=is_real[0:1, :])
    return flag


class ZeroRows(nl.NKIObject):
    """Zeroes the rows of shares in the result, one head in each step, beside other work."""

    def __init__(
        self,
        out: nl.NkiTensor,  # [H, S, d] HBM
        shares: list[Share],
        first_head: int,  # only the shares of these heads
        num_heads: int,
    ) -> None:
        self.out = out
        self.first_head = first_head
        self.pieces: list[tuple[int, int, int]] = []  # head, first row tile, number of them
        for share in shares:
            own = first_head <= share.first_head and share.first_head < first_head + num_heads
            if own and share.may_be_padding:
                for head in range(share.num_heads):
                    for first in range(0, len(share.row_tiles), ZERO_TILES):
                        count = min(ZERO_TILES, len(share.row_tiles) - first)
                        for run in runs_of(share.row_tiles, first, count):
                            tile, length = run
                            piece = (share.first_head + head, share.row_tiles[tile], length)
                            self.pieces.append(piece)
        self.steps = len(self.pieces)
        self.vector_ns = 0.0
        self.done = 0
        shape = (PARTITIONS, ZERO_TILES * out.shape[2])
        self.zeros = nl.ndarray(shape, dtype=out.dtype, buffer=nl.sbuf)

    def prepare(self) -> None:
        """Write the zeros that are stored."""
        if self.steps > 0 and self.done == 0:
            nisa.memset(dst=self.zeros, value=0.0, engine=nisa.engine.gpsimd)

    def step(self) -> None:
        """Zero the next rows."""
        head, tile, count = self.pieces[self.done]
        nisa.dma_copy(
            dst=row_tile_view(self.out, head, 1, tile, count),
            src=self.zeros[:, 0 : count * self.out.shape[2]],
        )
        self.done = self.done + 1

    def finish(self) -> None:
        """Zero the rows that are left."""
        self.prepare()
        while self.done < self.steps:
            self.step()


class Condition(nl.NKIObject):
    """Work that is done once if a number [1, 1] int32 in SBUF is 1, or always (None).

    Each part is a loop of that many trips, one after the other: dynamic loops are not nested.
    """

    def __init__(self, flag: nl.NkiTensor | None) -> None:
        self.trips: nisa.VirtualRegister | None = None
        if flag is not None:
            self.trips = nisa.register_alloc()
            nisa.register_load(self.trips, flag)

    def run(self, part: Body) -> None:
        """One part of the work."""
        if self.trips is None:
            part(0)
        else:
            nl.fori_loop(0, self.trips, part)
