"""Tests of the NKI interpreter (reference.nki)."""
