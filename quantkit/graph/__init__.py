"""A float ONNX graph: opened, fused, observed, and given its quantizers."""
