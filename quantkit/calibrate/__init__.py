"""Calibration sets to token ids to statistics."""
