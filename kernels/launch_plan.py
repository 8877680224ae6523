"""How many heads one launch of a prefill kernel takes, so that its program stays short.

Programs are unrolled: every row tile against every key tile of the chunk, and of the segments in
the bodies of loops. With many heads or rows that is more than INSTRUCTION_LIMIT instructions, so
the host function launches the kernel several times, for some heads each. The compiled kernel is the
same for all of them: which KV head it reads of the cache is a run-time value.
"""

from dataclasses import dataclass, replace

from ..reference.paging import cdiv
from .device.prefill.band import Band
from .device.prefill.exact_rows import STEP_TILES
from .device.prefill.paged_prior import (
    HALF_SEGMENT,
    TAIL_SEGMENT,
    WINDOW_SEGMENT,
    takes_half,
    whole_segment_size,
)
from .device.prefill.share_tiles import BLOCK_TILES, num_blocks_of
from .device.prefill.window_stream import window_tiles
from .device.tile_schedule import Share, core_shares
from .sizes import PARTITIONS

INSTRUCTION_LIMIT = 20_000
"""Most instructions of one core's program after unrolling."""


@dataclass(frozen=True)
class ProgramShape:
    """What the length of a program depends on, besides its heads."""

    num_rows: int
    d: int
    bytes_per_element: int
    num_cores: int
    softmax: str
    window: int | None
    segment: int | None
    """Tokens of the prior's segments; None: there is no prior."""
    block_size: int
    k_pre_transposed: bool
    is_cast: bool = False
    """The cache has another dtype than the chunk."""

    @property
    def parts(self) -> int:
        """Matmuls of one product over the features."""
        return cdiv(self.d, PARTITIONS)

    def prior_segments(self, share: Share, softmax: str) -> list[int]:
        """Key tiles of the segments in the bodies of all loops."""
        if self.segment is None or self.window == 1:
            return []
        if self.window is not None:
            end = self.sections()[1]
            return [min(WINDOW_SEGMENT, self.segment) // PARTITIONS] if end < 0 else []
        tail = min(TAIL_SEGMENT, self.segment) // PARTITIONS
        if self.segment <= TAIL_SEGMENT:
            return [tail]
        whole, bodies = whole_segment_size(
            self.segment, self.block_size, share, softmax == "exact",
            self.bytes_per_element * self.parts,
        )  # fmt: skip
        segments = [whole // PARTITIONS] * bodies + [tail]
        if softmax == "exact" and takes_half(whole, share, self.bytes_per_element * self.parts):
            segments.append(HALF_SEGMENT // PARTITIONS)
        return segments

    def sections(self) -> tuple[int, int, int]:
        """First and last key tile of a window's sections, and how many are in one."""
        if self.segment is None or self.window is None or self.window == 1:
            return 0, 0, 1
        return window_tiles(self.window, self.num_rows, self.d, self.bytes_per_element)

    def instructions(self, share: Share, softmax: str) -> int:
        """Of one share; an upper bound, up to a quarter above the truth."""
        band = Band(self.window)
        row_tiles, heads = share.row_tiles, share.num_heads
        tiles = heads * len(row_tiles)
        segments = self.prior_segments(share, softmax)
        first, end, section = self.sections()
        # Key tiles that a row tile sees of the chunk and of the sections.
        own = [t + 1 - max(0, t - band.reach) for t in row_tiles]
        edge = [max(0, end - max(first, t - band.reach)) for t in row_tiles]
        chunk_pairs = heads * sum(own)
        prior_pairs = heads * sum(edge) + tiles * sum(segments)
        parts = self.parts
        keys = max(row_tiles) + 1 + sum(segments) + 2 * (end - first)
        prepared = int(keys * (1.5 * parts + 2) + tiles * (1.5 * parts + 2.5)) + 300
        if self.k_pre_transposed and self.segment is not None:
            prepared += 5 * parts * max(self.segment, TAIL_SEGMENT) // self.block_size
            prepared += parts * (end - first) * (PARTITIONS // self.block_size + 1)
        if softmax == "exact":
            copies = 2 if self.bytes_per_element * parts > 2 else 1
            per_step = [*own, *(min(section, n) for n in edge)]
            steps = heads * sum(cdiv(n, STEP_TILES) for n in per_step)
            steps += heads * sum(n // section for n in edge)
            steps += tiles * sum(cdiv(n, STEP_TILES) for n in segments)
            products = chunk_pairs * (2.15 + (parts + copies) / 4)
            products += prior_pairs * (2.1 + (parts + copies) / 4)
            if self.is_cast or self.k_pre_transposed:
                products += prior_pairs / 4  # masks
            return int(products) + 8 * steps + prepared
        # Of a block of up to BLOCK_TILES row tiles, a key tile counts once, cut ones alone.
        block_keys = heads * (sum(own) + sum(edge)) // min(BLOCK_TILES, tiles) + num_blocks_of(
            share
        ) * (sum(segments) + 6)
        return chunk_pairs + prior_pairs + int(block_keys * (parts + 0.6)) + prepared


def program_length(shape: ProgramShape, num_q_heads: int, group: int) -> int:
    """Instructions of the longer one of the cores' programs, at most."""
    lengths = []
    modes = {"auto": ("bounded", "exact")}.get(shape.softmax, (shape.softmax,))
    for core in range(shape.num_cores):
        shares = core_shares(
            num_q_heads, group, shape.num_rows // PARTITIONS, shape.d, shape.bytes_per_element,
            core, shape.num_cores,
        )  # fmt: skip
        lengths.append(sum(shape.instructions(share, mode) for share in shares for mode in modes))
    return max(lengths)


@dataclass(frozen=True)
class LaunchPlan:
    """What is launched for a call: `softmax` for `heads` query heads at a time.

    `exact_heads` is not None where a program of both softmaxes is too long: the heads of a launch
    of the bounded one that fails its check are launched again then, so many at a time.
    """

    heads: int
    softmax: str
    exact_heads: int | None = None


def plan_launches(shape: ProgramShape, num_q_heads: int, num_kv_heads: int) -> LaunchPlan:
    """As many heads in a launch as its program may have instructions.

    ValueError if the program of a single head is too long.
    """
    heads = heads_per_launch(shape, num_q_heads, num_kv_heads)
    if shape.softmax == "auto" and heads < num_q_heads // num_kv_heads:
        bounded = heads_per_launch(replace(shape, softmax="bounded"), num_q_heads, num_kv_heads)
        exact = heads_per_launch(replace(shape, softmax="exact"), num_q_heads, num_kv_heads)
        if bounded > heads and exact > 0:
            return LaunchPlan(bounded, "bounded", min(bounded, exact))
    if heads == 0:
        raise ValueError(
            f"q: S={shape.num_rows} rows of head_dim={shape.d} with softmax={shape.softmax!r} make "
            f"a program of some {program_length(shape, 1, 1)} instructions, must be at most "
            f"{INSTRUCTION_LIMIT}: call with fewer rows at once"
        )
    return LaunchPlan(heads, shape.softmax)


def heads_per_launch(shape: ProgramShape, num_q_heads: int, num_kv_heads: int) -> int:
    """Query heads of one launch: those of some KV heads, or some of one; 0: not even one fits."""
    group = num_q_heads // num_kv_heads
    for kv_heads in range(num_kv_heads, 0, -1):
        if num_kv_heads % kv_heads == 0:
            heads = kv_heads * group
            if program_length(shape, heads, group) <= INSTRUCTION_LIMIT:
                return heads
    for heads in range(group - 1, 0, -1):
        if group % heads == 0 and program_length(shape, heads, heads) <= INSTRUCTION_LIMIT:
            return heads
    return 0
