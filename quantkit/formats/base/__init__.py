"""Common parts of formats: grids, scales, bit packing, layouts of groups, quantized activations."""
