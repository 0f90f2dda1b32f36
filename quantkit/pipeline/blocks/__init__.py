"""The compile of a transformer, block by block."""
