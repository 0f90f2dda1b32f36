"""What formats have in common: grids, scales, packing of bits, layouts of groups, quantized activations."""
