"""Integer codes of a graph's weights: assignment, bias correction, learned rounding."""
