"""Where a network for TensorRT quantizes inputs: a search on the GPU, for speed, under a gate."""
