"""Calibration sets to token ids, images or pairs of texts, and those to statistics."""
