"""Packed weights to 16-bit floats in registers, one format a file."""
