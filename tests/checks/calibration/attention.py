"""Instruction streams shaped like AWS's public `attention_cte`, from its description.

Per group of 128 query rows and tile of 512 keys: scores on the Tensor Engine, scale and maximum on
the Vector Engine, exp on the Scalar Engine, a DMA transpose of the probabilities, four matmuls
with the values. Sections of 8192 keys; the maximum is over a section; the output of a section goes
through HBM when there is more than one. Groups are pipelined: values of group i, exp of group
i + 1, scores of group i + 2.
"""

from dataclasses import dataclass, field
from functools import cache

from segattn.reference.nki.cost.constants import BASE, CostConstants
from segattn.reference.nki.records import Access
from segattn.tests.checks.calibration.streams import Stream, bank, hbm, part, tile

FP32 = "float32"
HEAD_DIM = 128
KEY_TILE = 512
SECTION = 8192


@dataclass
class _Group:
    """128 query rows against the keys of one section."""

    num_tiles: int
    num_diagonal: int
    through_hbm: bool
    q: Access
    k: Access
    v: Access
    scores: list[Access] = field(default_factory=list)
    maximum: Access = field(default_factory=lambda: tile(128, 16, FP32))
    negated: Access = field(default_factory=lambda: tile(128, 1, FP32))
    transposed: list[Access] = field(default_factory=list)


class _Cte:
    """Emits the stages of a group; PSUM banks and buffers rotate as in the kernel."""

    def __init__(self) -> None:
        self.stream = Stream()
        self._score_banks = [bank(128, KEY_TILE) for _ in range(4)]
        self._value_banks = [bank(128, HEAD_DIM) for _ in range(4)]
        self._probabilities = [tile(128, KEY_TILE) for _ in range(8)]
        self._turn = 0

    def scores(self, group: _Group, j: int) -> None:
        """Scores of one tile, scaled into SBUF, with their maximum."""
        psum = self._score_banks[j % 4]
        self.stream.matmul(0, psum, group.q, part(group.k, slice(j * 512, j * 512 + 512)))
        out, partial = tile(128, KEY_TILE, FP32), part(group.maximum, slice(j, j + 1))
        group.scores.append(out)
        if j >= group.num_tiles - group.num_diagonal:
            raw = tile(128, KEY_TILE, FP32)
            self.stream.compute("vector", "tensor_scalar", 0, (raw,), (psum,), "multiply")
            self.stream.compute("gpsimd", "affine_select", 0, (out,), (raw,))
            self.stream.compute("vector", "tensor_reduce", 0, (partial,), (out,), "maximum")
        else:
            writes = (out, partial)
            self.stream.compute("vector", "tensor_scalar_reduce", 0, writes, (psum,), "multiply")
        if j == group.num_tiles - 1:
            used = part(group.maximum, slice(0, group.num_tiles))
            self.stream.compute("vector", "tensor_reduce", 0, (group.negated,), (used,), "maximum")

    def exp(self, group: _Group, j: int) -> None:
        """Probabilities of one tile with their sum, and their transpose by DMA."""
        p = self._probabilities[self._turn % 8]
        self._turn += 1
        writes = p, tile(128, 1, FP32)
        reads = group.scores[j], group.negated
        self.stream.compute("scalar", "activation", 0, writes, reads, "exp")
        p_t = tile(128, KEY_TILE)
        group.transposed.append(p_t)
        self.stream.dma("dma_transpose", 0, (p_t,), (p,), transpose=True)

    def values(self, group: _Group, j: int) -> None:
        """Output of one tile; the accumulator of four tiles is added into SBUF."""
        psum = self._value_banks[j // 4 % 4]
        for i in range(4):
            p_t = part(group.transposed[j], slice(i * 128, i * 128 + 128))
            key = j * 4 + i
            v = part(group.v, slice(key * HEAD_DIM, key * HEAD_DIM + HEAD_DIM))
            self.stream.matmul(0, psum, p_t, v)
        if j % 4 == 3 or j == group.num_tiles - 1:
            total = tile(128, HEAD_DIM, FP32)
            self.stream.compute("vector", "tensor_tensor", 0, (total,), (psum, total), "add")
            if j == group.num_tiles - 1:
                self.stream.load(hbm(128, HEAD_DIM, FP32), total)
                if group.through_hbm:
                    self.stream.load(tile(128, HEAD_DIM, FP32), hbm(128, HEAD_DIM, FP32))

    def run(self, groups: list[_Group]) -> None:
        """All groups, three stages deep."""
        for i in range(len(groups) + 2):
            for j in range(SECTION // KEY_TILE):
                for stage, group in ((self.scores, i), (self.exp, i - 1), (self.values, i - 2)):
                    if 0 <= group < len(groups) and j < groups[group].num_tiles:
                        stage(groups[group], j)

    def section(self, num_keys: int) -> tuple[Access, Access]:
        """K and V of one section, loaded."""
        k = tile(HEAD_DIM, num_keys)
        v = tile(128, num_keys // 128 * HEAD_DIM)
        for start in range(0, num_keys, 2048):
            columns = slice(start, min(start + 2048, num_keys))
            width = columns.stop - columns.start
            self.stream.load(part(k, columns), hbm(HEAD_DIM, width))
            self.stream.load(part(v, columns), hbm(128, width))
        return k, v


@cache
def _dense(num_groups: int, num_sections: int, constants: CostConstants) -> float:
    cte = _Cte()
    groups = []
    for _ in range(num_sections):
        k, v = cte.section(SECTION)
        for _ in range(num_groups):
            q = tile(HEAD_DIM, 128)
            groups.append(_Group(SECTION // KEY_TILE, 0, True, q, k, v))
    cte.run(groups)
    return cte.stream.evaluate(constants).modelled_ns


@cache
def dense_ns(heads: int, num_queries: int, num_keys: int, constants: CostConstants = BASE) -> float:
    """Dense attention, head_dim 128, over the two cores of a pair: time of the fuller core.

    Hundreds of thousands of instructions in a steady pattern: the time of one group in one section
    and of one section's loads come from three short runs, and the rest is linear in their number.
    """
    groups = -(-num_queries // 128)
    sections = -(-num_keys // KEY_TILE) * KEY_TILE / SECTION
    # An odd head is split over the cores by rows.
    groups_per_core = (heads // 2) * groups + (heads % 2) * (groups - groups // 2)
    heads_per_core = heads // 2 + heads % 2
    few, more, longer = (_dense(g, s, constants) for g, s in ((4, 3), (8, 3), (4, 4)))
    per_group = (more - few) / 12
    per_section = longer - few - 4 * per_group
    fill = few - 12 * per_group - 3 * per_section
    return fill + sections * (groups_per_core * per_group + heads_per_core * per_section)


@cache
def causal_ns(heads: int, num_rows: int, constants: CostConstants = BASE) -> float:
    """Causal attention of `num_rows` <= 8192 rows, head_dim 128, on one core.

    Linear in the number of heads, so taken from runs of two and of four.
    """
    short, long = (_causal(n, num_rows, constants) for n in (2, 4))
    return short + (long - short) / 2 * (heads - 2)


def _causal(heads: int, num_rows: int, constants: CostConstants) -> float:
    cte = _Cte()
    groups = []
    for _ in range(heads):
        k, v = cte.section(num_rows)
        for i in range(num_rows // 128):
            q = tile(HEAD_DIM, 128)
            groups.append(_Group(-(-(i + 1) * 128 // KEY_TILE), 1, False, q, k, v))
    cte.run(groups)
    return cte.stream.evaluate(constants).modelled_ns
