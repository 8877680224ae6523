"""What the two softmaxes have in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from ...backend import nl
from ...sizes import MATMUL_COLUMNS, PARTITIONS, ScoreNumbers
from ..softmax import ScoreScale, sigmoid_of
from .background import Background
from .kv_tiles import KvTiles
from .on_chip import sbuf
from .query_tiles import QueryTiles

SIGMOID_BUFFERS = 8
"""Tiles of capped scores: those of two iterations of the online softmax."""


def _nobody(queries: QueryTiles, block: int) -> None:
    """Nobody waits for q_blocks."""


class Softmax(ABC):
    """A software pipeline over kv_tiles, with time for other work beside its iterations."""

    is_exact: bool

    def __init__(self, numbers: ScoreNumbers) -> None:
        self.numbers = numbers
        self.scale = numbers.of_scores
        self._sigmoids: list[nl.NkiTensor] = []
        if numbers.softcap:
            self._sigmoids = [sbuf((PARTITIONS, MATMUL_COLUMNS)) for _ in range(SIGMOID_BUFFERS)]
        self._num_sigmoids = 0
        self.background = Background()
        self.block_done: Callable[[QueryTiles, int], None] = _nobody
        """Told of each q_block whose pass is complete."""

    def raw_scores(self, products: nl.NkiTensor, kv: KvTiles) -> nl.NkiTensor:
        """Products in PSUM, with a cap their sigmoids in SBUF."""
        if not self._sigmoids:
            return products
        own = self._sigmoids[self._num_sigmoids % SIGMOID_BUFFERS][:, 0 : products.shape[1]]
        self._num_sigmoids += 1
        sigmoid_of(own, products, kv.scale.negative)
        return own

    def score_scale(self, kv: KvTiles) -> ScoreScale:
        """Factor of raw scores."""
        return ScoreScale(self.scale, -self.scale) if self._sigmoids else kv.scale

    @abstractmethod
    def add_queries(self, queries: QueryTiles) -> None:
        """Make the shifts of a q_group."""

    @abstractmethod
    def clear_from(self, queries: QueryTiles, block: int) -> None:
        """No key seen yet: for the q_tiles of this q_block and of those after it."""

    @abstractmethod
    def attend_blocks(
        self, queries: QueryTiles, blocks: Sequence[int], kv: KvTiles, add: bool
    ) -> None:
        """q_blocks over the kv_tiles that they see; sets their accumulators, or adds to them."""

    @abstractmethod
    def release(self, kv: KvTiles) -> None:
        """Finish the iterations in flight that read these kv_tiles: they may be written again."""

    @abstractmethod
    def drain(self) -> None:
        """Finish every iteration; the next one finds the rings of buffers as the first one did."""

    @abstractmethod
    def weigh_sinks(
        self, queries: QueryTiles, sinks: nl.NkiTensor, tiles: range, weights: nl.NkiTensor
    ) -> None:
        """Weights of the sinks [128, q_tiles] of some q_tiles."""

    @property
    def has_no_followers(self) -> bool:
        """Whether nobody is told of complete q_blocks."""
        return self.block_done is _nobody
