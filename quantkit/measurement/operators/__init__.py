"""Single products timed against each other and against the machine's ceilings: the dequantization tax."""
