"""What the two softmaxes have in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from ...backend import nl
from .background import Background
from .kv_tiles import KvTiles
from .query_tiles import QueryTiles


def _nobody(queries: QueryTiles, block: int) -> None:
    """Nobody waits for q_blocks."""


class Softmax(ABC):
    """A software pipeline over kv_tiles, with time for other work beside its iterations."""

    is_exact: bool

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.background = Background()
        self.block_done: Callable[[QueryTiles, int], None] = _nobody
        """Told of each q_block whose pass is complete."""

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
