"""Sizes of the hardware and numbers of the softmax that host, plans and device code share."""

from typing import NamedTuple

from ..reference.paging import ROW_TILE

PARTITIONS = ROW_TILE
"""Rows of one tile: SBUF and PSUM have 128 partitions, PE contracts over 128."""

PSUM_BANKS = 8
"""PSUM banks of a partition."""

PSUM_BANK_BYTES = 2048
"""Bytes of one PSUM bank per partition: 512 fp32 columns, the widest matmul result."""

MATMUL_COLUMNS = 512
"""Moving columns of one matmul: they fill one PSUM bank in fp32."""

SHORT_SEGMENT = 512
"""Most tokens of a segment with many queries, or of long keys: a trip of the loop over a prior has
one or more segments."""

LONGEST_SHORT_TRIP = 8192
"""Most tokens of a trip that may be used in part."""

TABLE_PADDING = LONGEST_SHORT_TRIP + 2048
"""Tokens of absent blocks that the block table of a prefill ends with: what the last trip reads
beyond the prior, and the segment that is gathered ahead of it."""

FLOOR = -(2.0**106)
"""Scores before the scale below about -8e31 count as this: -1e30 after 1 / sqrt(256) does not.
A power of two, so that scale * FLOOR is exact."""

MASKED = -1.5e38
"""Added to the score of a key that a row does not see, at most twice: finite then, so that the
hardware never meets infinity. Stays below FLOOR after a multiplication with a k_scale down to 1e-6.
"""

PRESENT, ABSENT = 3.4028234663852886e38, -1.5 * 2.0**127
"""Raw scores of work that requests share are held below the first where a request has the key, and
below the second where it has not: selected, not added, so that no finite score gets through. A
score of another request above -ABSENT makes infinite weights, which the host function notices."""


class ScoreNumbers(NamedTuple):
    """What makes scores of the products of queries and keys: compiled in, a tuple for kernels."""

    scale: float
    softcap: float = 0.0
    """c: scores are c * tanh(scale * product / c); 0: scale * product."""

    @property
    def of_products(self) -> float:
        """Factor of the products; with a cap that of minus the argument of `sigmoid_of`."""
        return 2.0 * self.scale / self.softcap if self.softcap else self.scale

    @property
    def of_scores(self) -> float:
        """Factor of raw scores: of products, or of sigmoids."""
        return 2.0 * self.softcap if self.softcap else self.scale


class SoftmaxArguments(NamedTuple):
    """How the softmax is taken: compiled in, a tuple as kernels take it."""

    numbers: ScoreNumbers
    window: int | None
    mode: str
    """"exact" or "bounded"."""
    with_lse: bool = False
    causal: bool = True
    in_order: bool = False
    """All of the chunk before the prior, so that the cut into q_groups changes no bit."""

    @classmethod
    def of(cls, given: "SoftmaxArguments") -> "SoftmaxArguments":
        """From what a kernel is given: plain tuples on a device."""
        numbers, window, mode, with_lse, causal, in_order = given
        return cls(ScoreNumbers(*numbers), window, mode, with_lse, causal, in_order)


EDGE_BLOCKS = 3
"""Most blocks of a chunk that a cache write fills in part, or at the end, besides its runs."""


COLUMN_BYTES = 8192
"""Most bytes of such a part."""


def num_runs(num_tokens: int, run: int) -> int:
    """Runs of `run` tokens of a KV head that a cache write stores, wherever the first one begins;
    0 tokens are no run.
    """
    return max(0, (num_tokens - run + 1) // run) if run else 0


def single_tokens(num_tokens: int, run: int) -> int:
    """Most tokens that a cache write with such runs stores by themselves."""
    return 2 * run if run else num_tokens


def column_parts(head_dim: int, block_size: int, itemsize: int) -> int:
    """Parts of a pre-transposed block of a head, equal numbers of its features, that a cache write
    holds on a partition each.
    """
    return next(
        n for n in range(1, head_dim + 1)
        if head_dim % n == 0 and head_dim // n * block_size * itemsize <= COLUMN_BYTES
    )  # fmt: skip


def tile_heights(rows: int) -> list[int]:
    """Rows of each tile of 128, the last one cut."""
    return [min(PARTITIONS, rows - first) for first in range(0, rows, PARTITIONS)]


def padded_features(head_dim: int) -> int:
    """Features that the columns of a head have room for beyond 128: whole partitions."""
    return head_dim if head_dim <= PARTITIONS else -(-head_dim // PARTITIONS) * PARTITIONS
