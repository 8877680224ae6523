"""Keys of a group of slots as columns [features, 128 keys], the stationary operands of the scores.

PE transposes keys in rows, as many chunks of 128 elements as fill a PSUM bank at a time. Keys in
fp8 are transposed without a cast as 16-bit elements, which are pairs of features; of a pair's two
bytes one belongs to the even features, one to the odd ones. Keys that come in columns are selected.
"""

from dataclasses import dataclass

from ...backend import nisa, nl
from ...sizes import PARTITIONS
from .stage import DecodeStage
from .tensors import DecodeBuffers, DecodeTensors, packed_tokens


@dataclass
class TurnedKeys(nl.NKIObject):
    """Key chunks first .. first + count - 1: transposed in PSUM, then in SBUF."""

    keys: nl.NkiTensor | None  # [features, count * 128]; None in PSUM of keys that come in columns
    width: int  # features
    first: int
    count: int
    edges: bool


def key_features(tensors: DecodeTensors, in_columns: bool) -> list[tuple[int, int, int]]:
    """Features of a token that one matmul contracts: (first, step, number) of each."""
    d = tensors.q.shape[3]
    if tensors.k_cache.dtype != tensors.q.dtype and not in_columns:
        return [(0, 2, d // 2), (1, 2, d // 2)]
    features: list[tuple[int, int, int]] = []
    for first in range(0, d, PARTITIONS):
        features.append((first, 1, min(PARTITIONS, d - first)))
    return features


class DecodeKeys(nl.NKIObject):
    """Chunks of a group's keys: those of the slots in order, then those of the edge tokens."""

    def __init__(self, stage: DecodeStage, buffers: DecodeBuffers) -> None:
        tensors, tokens = stage.tensors, stage.tokens
        in_columns = stage.key_blocks is not None
        self.stage = stage
        self.buffers = buffers
        self.d = tensors.q.shape[3]
        self.tokens = tokens
        self.heads = tensors.heads
        self.slots = stage.slots
        self.features = key_features(tensors, in_columns)
        self.pairs = self.features[0][1] == 2
        # Chunks of a token, or tokens of a chunk: the elements fill the 128 partitions.
        self.parts = len(self.features)
        if self.pairs:
            self.parts = 1
        self.pack = 1
        if not in_columns and self.parts == 1:
            self.pack = packed_tokens(self.features[0][2], tokens)
        self.slot_chunks = tensors.heads * tokens // self.pack * self.parts
        self.edge_chunks = stage.edge_tiles * tensors.heads * self.parts
        self.turned: list[TurnedKeys] = []
        self.ready: list[TurnedKeys] = []

    def turn(self, chunks: list[nl.NkiTensor]) -> nl.NkiTensor:
        """Chunks [128 keys, elements] as columns [elements, chunks * 128] in PSUM."""
        bank = self.buffers.next_bank(self.buffers.dtype)
        for i in range(len(chunks)):
            turned = bank[0 : chunks[i].shape[1], i * PARTITIONS : (i + 1) * PARTITIONS]
            nisa.nc_transpose(dst=turned, data=chunks[i], engine=nisa.engine.tensor)
        return bank

    def chunk(self, stage: nl.NkiTensor, first: int, count: int) -> nl.NkiTensor:
        """Elements of a staging tile [128, ...] that are transposed: pairs of fp8 as one."""
        if not self.pairs:
            return stage[:, first : first + count]
        return stage.ap(
            [[stage.shape[1] // 2, PARTITIONS], [1, count // 2]], offset=first // 2,
            dtype=self.buffers.dtype,
        )  # fmt: skip

    def stationary(self, keys: nl.NkiTensor, chunk: int, height: int, part: int) -> nl.NkiTensor:
        """A part of the features of the keys of a transposed chunk, [features, 128]."""
        if not self.pairs:
            return keys[0:height, chunk * PARTITIONS : (chunk + 1) * PARTITIONS]
        return keys.ap(
            [[2 * keys.shape[1], height], [2, PARTITIONS]], offset=2 * chunk * PARTITIONS + part,
            dtype=self.stage.tensors.k_cache.dtype,
        )  # fmt: skip

    def select_keys(
        self,
        present: nl.NkiTensor,  # [128, slots * 128] uint8: whether a partition has a run
        first: int,
        count: int,
        keys: nl.NkiTensor,  # [128, count * 128 or more], result
    ) -> None:
        """Chunks of slots that lie in columns already, zero where there is no run."""
        parts, tokens = self.parts, self.tokens
        done = 0
        while done < count:
            slot = (first + done) // self.slot_chunks
            inner = (first + done) % self.slot_chunks
            part = inner % parts
            head = inner // parts // tokens
            token = inner // parts % tokens
            together = 1
            if parts == 1:
                together = min(count - done, tokens - token)
            width = min(PARTITIONS, self.d - part * PARTITIONS)
            nisa.select_reduce(
                dst=keys.ap(
                    [[keys.shape[1], width], [PARTITIONS, together], [1, 8], [8, 16]],
                    offset=done * PARTITIONS,
                ),
                predicate=present.ap(
                    [[present.shape[1], width], [0, together], [1, 8], [8, 16]],
                    offset=slot * PARTITIONS,
                ),
                on_true=self.stage.key_columns(slot, head, token, together, part),
                on_false=0.0,
            )
            done = done + together

    def select_edges(
        self,
        present: nl.NkiTensor,  # [128, ...] uint8, the edge tokens behind the slots
        first: int,
        count: int,
        keys: nl.NkiTensor,  # [128, count * 128 or more], result
    ) -> None:
        """Chunks of edge tokens that lie in columns already, zero where there is no token."""
        parts, heads = self.parts, self.heads
        for i in range(count):
            part = (first + i) % parts
            head = (first + i) // parts % heads
            tile = (first + i) // parts // heads
            width = min(PARTITIONS, self.d - part * PARTITIONS)
            begin = (self.slots + tile) * PARTITIONS
            nisa.select_reduce(
                dst=keys[0:width, i * PARTITIONS : (i + 1) * PARTITIONS],
                predicate=present[0:width, begin : begin + PARTITIONS],
                on_true=self.stage.edge_columns(tile, head, part),
                on_false=0.0,
            )

    def banks(self) -> int:
        """Banks of transposed keys: those of the slots, then those of the edge tokens."""
        per_bank = self.buffers.chunks_per_bank()
        slot_banks = (self.slots * self.slot_chunks + per_bank - 1) // per_bank
        return slot_banks + (self.edge_chunks + per_bank - 1) // per_bank

    def slots_of_banks(self, banks: int) -> int:
        """Slots whose last chunk is in the first banks; the edge tokens count as one."""
        if banks == self.banks():
            return self.slots + 1
        chunks = banks * self.buffers.chunks_per_bank()
        return min(self.slots, chunks // self.slot_chunks)

    def turn_bank(self, bank: int) -> None:
        """Transpose a bank of key chunks."""
        per_bank, parts, d = self.buffers.chunks_per_bank(), self.parts, self.d
        total = self.slots * self.slot_chunks
        slot_banks = (total + per_bank - 1) // per_bank
        edges = bank >= slot_banks
        first = bank * per_bank
        pack = self.pack
        if edges:
            first = (bank - slot_banks) * per_bank
            total = self.edge_chunks
            pack = 1
        count = min(per_bank, total - first)
        if self.stage.present is not None:
            self.turned.append(TurnedKeys(None, PARTITIONS, first, count, edges))
            return
        chunks: list[nl.NkiTensor] = []
        for chunk in range(first, first + count):
            stage = self.stage.k_stage[self.slots][0]
            inner = chunk
            if not edges:
                stage = self.stage.k_stage[chunk // self.slot_chunks][0]
                inner = chunk % self.slot_chunks
            column = inner // parts * pack * d + inner % parts * PARTITIONS
            width = pack * d
            if parts > 1:
                width = min(PARTITIONS, d - inner % parts * PARTITIONS)
            chunks.append(self.chunk(stage, column, width))
        width = chunks[0].shape[1]
        self.turned.append(TurnedKeys(self.turn(chunks), width, first, count, edges))

    def copy_bank(self, engine: nisa.engine) -> None:
        """Bring the bank that was transposed first to SBUF."""
        turned = self.turned[0]
        self.turned.remove(turned)
        keys = self.buffers.next_keys()
        listed = self.stage.present
        if turned.keys is not None:
            columns = turned.count * PARTITIONS
            nisa.tensor_copy(
                dst=keys[0 : turned.width, 0:columns],
                src=turned.keys[0 : turned.width, 0:columns],
                engine=engine,
            )
        elif listed is not None:
            if turned.edges:
                self.select_edges(listed.tile, turned.first, turned.count, keys)
            else:
                self.select_keys(listed.tile, turned.first, turned.count, keys)
        self.ready.append(TurnedKeys(keys, turned.width, turned.first, turned.count, turned.edges))

    def query_parts(self, chunk: int) -> list[int]:
        """Parts of the queries that meet a chunk: both of a pair's, else the chunk's own."""
        if self.pairs:
            return [0, 1]
        return [chunk % self.parts]
