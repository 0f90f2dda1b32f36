"""A transformer as an ONNX graph, exported once on shapes, and what every dialect needs to rewrite it."""
