"""A calibration set's name or path: its card, its splits, its images, arrays and pairs."""
