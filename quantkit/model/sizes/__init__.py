"""Sizes of a model: shapes, storage of each layer, bytes. No weights are read."""
