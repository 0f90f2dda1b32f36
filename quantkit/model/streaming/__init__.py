"""Running a model block by block, in the memory of one block, and the proof that the result is the same."""
