"""Comparisons of every night: a matrix of cells, measured, kept, decided, shown."""
