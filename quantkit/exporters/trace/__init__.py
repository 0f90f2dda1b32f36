"""A transformer as an ONNX graph, exported once on shapes, and what every dialect needs to rewrite it."""

# remedy for a model without a graph
CHECKPOINT = "compile to a checkpoint alone: --set 'export=[{checkpoint: {}}]'"
