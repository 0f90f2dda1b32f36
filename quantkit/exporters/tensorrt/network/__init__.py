"""The network that an engine is built from: its dialect, weights and pairs, and its check on the CPU."""
