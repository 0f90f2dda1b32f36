"""A transformer as an ONNX graph, exported once on shapes, and what every dialect needs to rewrite it."""

# the remedy for what no graph holds
CHECKPOINT = "compile to a checkpoint alone: --set 'export=[{checkpoint: {}}]'"
