"""Calibration: from sets to token ids, images or pairs of texts, and from those to statistics."""
