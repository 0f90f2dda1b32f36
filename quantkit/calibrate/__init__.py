"""Calibration: from sets to token ids, images or pairs of texts, and from those to statistics."""

# parts of every sum that ranks share, for any number of them
PARTS = 8
