"""Checks that developers run by hand: peers, coverage, mutation, calibration. Not installed."""
