"""Calibration sets by name or path: cards, splits, images, arrays and pairs."""
