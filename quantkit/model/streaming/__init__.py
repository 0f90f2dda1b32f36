"""A model that runs block by block, so that memory grows with one block, and the proof that it is the same model."""
