"""Single rates that third parties measured, each from a short stream of instructions."""

from dataclasses import replace

from segattn.reference.nki.cost.constants import BASE, CostConstants, variant
from segattn.tests.checks.calibration.streams import Stream, bank, hbm, tile

FIELD = variant("field")


def _per_instruction_ns(stream: Stream, more: Stream, number: int, c: CostConstants) -> float:
    """Time of each of the `number` instructions that `more` has beyond `stream`."""
    return (more.evaluate(c).modelled_ns - stream.evaluate(c).modelled_ns) / number


def _matmuls(number: int) -> Stream:
    stream = Stream()
    psum, stationary, moving = bank(128, 512), tile(128, 128), tile(128, 512)
    for _ in range(number):
        stream.matmul(0, psum, stationary, moving)
    return stream


def moving_column_ns(constants: CostConstants = FIELD) -> float:
    """A column of 512 in a long row of bf16 matmuls."""
    return _per_instruction_ns(_matmuls(50), _matmuls(150), 100, constants) / 512


def matmul_tflops(constants: CostConstants = FIELD) -> float:
    """Two cores with nothing but matmuls of 128 x 128 x 512."""
    return 2 * 2 * 128 * 128 / moving_column_ns(constants) / 1e3


def gather_rate(constants: CostConstants = FIELD) -> float:
    """GB/s of one core that gathers rows of 2 KiB, 128 in each DMA."""

    def gathers(number: int) -> Stream:
        stream, index = Stream(), tile(128, 1, "int32")
        for _ in range(number):
            rows = hbm(128, 1024)._replace(indirect=True)
            stream.dma("dma_copy", 0, (tile(128, 1024),), (rows, index), dge_mode="swdge")
        return stream

    return 128 * 2048 / _per_instruction_ns(gathers(8), gathers(24), 16, constants)


def trip_us(constants: CostConstants = BASE) -> float:
    """A trip of a device loop with one short instruction."""

    def loop(trips: int) -> Stream:
        stream = Stream()
        stream.loop("begin", 0)
        for _ in range(trips):
            stream.loop("iteration", 0)
            stream.compute("vector", "memset", 0, (tile(128, 8),), ())
        stream.loop("end", 0)
        return stream

    return _per_instruction_ns(loop(2), loop(12), 10, constants) / 1e3


def exp_ns(columns: int) -> float:
    """An exp with row sum among others, at the trn1 clock."""

    def exps(number: int) -> Stream:
        stream, scores = Stream(), bank(128, columns)
        for _ in range(number):
            writes = tile(128, columns), tile(128, 1, "float32")
            stream.compute("scalar", "activation", 0, writes, (scores,), "exp")
        return stream

    return _per_instruction_ns(exps(2), exps(12), 10, replace(BASE, scalar_ghz=1.4))
