"""Codes of a graph's weights: assigned, corrected, rounded by gradient."""
