"""Intervals and tests, used by measure, tune and nightly alike."""
