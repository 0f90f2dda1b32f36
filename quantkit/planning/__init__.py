"""The numbers predicted before the work: shapes, memory, time, cost. Torch-free, no weights needed."""
