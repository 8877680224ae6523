"""Hazards by address: overlap is exact for strided patterns, edges follow program order."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from segattn.reference.nki.cost.dependencies import Edge, hazards
from segattn.reference.nki.cost.overlap import Footprint, overlaps
from segattn.reference.nki.records import Access
from segattn.tests.checks.calibration.streams import Stream, bank, hbm, part, tile


def touched(access: Access) -> set[tuple[int, int]]:
    """(partition, byte) by walking every element."""
    cells: set[tuple[int, int]] = set()
    for index in product(*(range(n) for n in access.shape)):
        steps = [i * s for i, s in zip(index, access.strides, strict=True)]
        partition = access.partition + (steps.pop(0) if access.on_chip else 0)
        first = access.offset + sum(steps)
        cells.update((partition, first + byte) for byte in range(access.itemsize))
    return cells


@st.composite
def accesses(draw: st.DrawFn) -> Access:
    itemsize = draw(st.sampled_from([1, 2, 4]))
    dims = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    strides = [draw(st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12, 24])) * itemsize for _ in dims]
    on_chip = draw(st.booleans())
    if on_chip:
        return Access(
            1,
            "sbuf",
            "bfloat16",
            itemsize,
            draw(st.integers(0, 40)),
            draw(st.integers(0, 4)),
            (draw(st.integers(1, 4)), *dims),
            (draw(st.sampled_from([0, 1])), *strides),
        )
    return Access(
        1, "hbm", "bfloat16", itemsize, draw(st.integers(0, 40)), 0, tuple(dims), tuple(strides)
    )


@given(accesses(), accesses())
def test_overlap_is_exactly_a_common_byte(a: Access, b: Access) -> None:
    expected = bool(touched(a) & touched(b))
    assert overlaps(Footprint.of(a), Footprint.of(b)) == expected


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_boxes_of_one_tensor_overlap_as_their_index_ranges_do(
    rows: int, columns: int, data: st.DataObject
) -> None:
    whole = hbm(rows, columns)._replace(offset=data.draw(st.integers(0, 7)))

    def box() -> Access:
        r = sorted(data.draw(st.lists(st.integers(0, rows), min_size=2, max_size=2)))
        c = sorted(data.draw(st.lists(st.integers(0, columns), min_size=2, max_size=2)))
        return part(whole, slice(*c), slice(*r))

    a, b = box(), box()
    assert overlaps(Footprint.of(a), Footprint.of(b)) == bool(touched(a) & touched(b))


def test_a_pattern_that_steps_over_itself_is_compared_run_by_run() -> None:
    twice = hbm(1, 1)._replace(shape=(2, 3), strides=(8, 8), itemsize=4)  # 0, 8, 16, 24
    last = hbm(1, 1)._replace(offset=24)
    assert overlaps(Footprint.of(twice), Footprint.of(last))
    assert not overlaps(Footprint.of(twice), Footprint.of(last._replace(offset=28)))


def test_heads_of_a_cache_row_by_row_do_not_meet() -> None:
    cache = hbm(4096, 2 * 128)
    first, second = part(cache, slice(0, 128)), part(cache, slice(128, 256))
    assert not overlaps(Footprint.of(first), Footprint.of(second))
    assert overlaps(Footprint.of(first), Footprint.of(part(cache, slice(127, 200))))


def edges(stream: Stream) -> list[list[Edge]]:
    return hazards(stream.launches[0].records)


def test_a_read_waits_for_the_write_and_the_next_write_for_the_read() -> None:
    stream = Stream()
    a, b = tile(128, 8), tile(128, 8)
    stream.compute("vector", "memset", 0, (a,), ())
    stream.compute("scalar", "activation", 0, (b,), (a,), "exp")
    stream.compute("gpsimd", "memset", 0, (a,), ())
    assert edges(stream) == [[], [Edge(0, "RAW")], [Edge(0, "WAW"), Edge(1, "WAR")]]


def test_tiles_at_the_same_address_order_their_users_and_others_do_not() -> None:
    stream = Stream()
    arena = tile(128, 64)
    left, right = part(arena, slice(0, 32)), part(arena, slice(32, 64))
    middle = part(arena, slice(16, 48))
    stream.compute("vector", "memset", 0, (left,), ())
    stream.compute("vector", "memset", 0, (right,), ())
    stream.compute("scalar", "activation", 0, (tile(128, 32),), (middle,), "exp")
    assert edges(stream) == [[], [], [Edge(0, "RAW"), Edge(1, "RAW")]]


def test_partitions_apart_are_no_hazard() -> None:
    stream = Stream()
    whole = tile(128, 8)
    stream.compute("vector", "memset", 0, (part(whole, rows=slice(0, 64)),), ())
    stream.compute("scalar", "activation", 0, (part(whole, rows=slice(64, 128)),), (), "exp")
    assert edges(stream) == [[], []]


def test_an_indirect_read_meets_every_write_to_its_tensor() -> None:
    stream = Stream()
    cache = hbm(1024, 64)
    stream.load(part(cache, rows=slice(0, 128)), tile(128, 64))
    stream.load(tile(128, 64), part(cache, rows=slice(0, 128))._replace(indirect=True))
    stream.load(part(cache, rows=slice(512, 640)), tile(128, 64))
    assert edges(stream) == [[], [Edge(0, "RAW")], [Edge(1, "WAR")]]


def test_all_readers_since_the_last_write_hold_back_the_next_one() -> None:
    stream = Stream()
    a = tile(128, 8)
    stream.compute("vector", "memset", 0, (a,), ())
    stream.compute("scalar", "activation", 0, (tile(128, 8),), (a,), "exp")
    stream.compute("gpsimd", "tensor_copy", 0, (tile(128, 8),), (a,))
    stream.compute("vector", "memset", 0, (a,), ())
    stream.compute("scalar", "activation", 0, (tile(128, 8),), (a,), "exp")
    stream.compute("vector", "memset", 0, (a,), ())
    assert edges(stream)[3] == [Edge(0, "WAW"), Edge(1, "WAR"), Edge(2, "WAR")]
    assert edges(stream)[5] == [Edge(3, "WAW"), Edge(4, "WAR")]


def test_tiles_that_follow_each_other_in_one_place_wait_for_the_last_one_only() -> None:
    stream = Stream()
    place = bank(128, 512)
    for tensor in range(1, 7):
        scores = place._replace(tensor=tensor)
        stream.matmul(0, scores, tile(128, 128), tile(128, 512))
        stream.compute("scalar", "activation", 0, (tile(128, 512),), (scores,), "exp")
    for whole_tensors in (False, True):
        found = hazards(stream.launches[0].records, whole_tensors)
        assert found[10] == [Edge(8, "WAW"), Edge(9, "WAR")]


def test_a_write_to_one_half_keeps_the_reader_for_the_other_half() -> None:
    stream = Stream()
    a = tile(128, 8)
    halves = part(a, slice(0, 4)), part(a, slice(4, 8))
    stream.compute("scalar", "activation", 0, (tile(128, 8),), (a,), "exp")
    stream.compute("vector", "memset", 0, (halves[0],), ())
    stream.compute("gpsimd", "memset", 0, (halves[1],), ())
    assert edges(stream)[2] == [Edge(0, "WAR")]


def test_an_accumulation_orders_its_matmuls_and_does_not_read() -> None:
    stream = Stream()
    out, a = bank(128, 512), tile(128, 128)
    for _ in range(3):
        stream.matmul(0, out, a, tile(128, 512))
    assert edges(stream) == [[], [Edge(0, "WAW")], [Edge(1, "WAW")]]


def test_cores_are_not_ordered_by_memory() -> None:
    stream = Stream(2)
    shared = hbm(128, 8)
    stream.load(shared, tile(128, 8), core=0)
    stream.load(tile(128, 8), shared, core=1)
    assert edges(stream) == [[], []]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(1, 6)), max_size=12))
def test_every_conflicting_pair_is_ordered_through_edges(
    operations: list[tuple[bool, int, int]],
) -> None:
    arena = tile(128, 16)
    stream = Stream()
    parts = []
    for is_write, start, width in operations:
        access = part(arena, slice(start, start + width))
        parts.append((is_write, access))
        other = tile(128, 8)
        pair = ((access,), (other,)) if is_write else ((other,), (access,))
        stream.compute("vector", "tensor_copy", 0, *pair)
    before: list[set[int]] = []
    for index, own in enumerate(edges(stream)):
        reached = set()
        for edge in own:
            assert edge.producer < index
            reached |= {edge.producer} | before[edge.producer]
        before.append(reached)
    for later, (writes_later, b) in enumerate(parts):
        for earlier, (writes_earlier, a) in enumerate(parts[:later]):
            if (writes_later or writes_earlier) and touched(a) & touched(b):
                assert earlier in before[later]
