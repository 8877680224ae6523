"""Sizes of the hardware and numbers of the softmax that host, plans and device code share."""

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
