"""Float ONNX graphs: opening, fusion, observation of activations, and insertion of quantizers."""
