"""Statistics of calibration: of each shared input, ranges, fixed scales, routing."""
