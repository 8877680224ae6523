"""Pieces of the decode kernel: where keys come from, work tiles, the end of a batch."""
