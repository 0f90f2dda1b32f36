"""A model as sizes: shapes, what stores which layer how, and how many bytes that takes. No weights are read."""
