"""The compile of a float ONNX graph."""
