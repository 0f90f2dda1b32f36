"""From a reference to blocks in memory: opening a model, streaming its layers, tracing its structure.

`open_model` (source/open.py) turns a folder, `hf:org/name` or an alias into a `Source`: config, tokenizer, an empty
skeleton on the meta device and the strict, lazy `Weights` (source/weights.py) that fill it block by block.
`source/alias.py` lists the shipped models; `source/gguf/` converts those that come as GGUF, `source/packaged.py`
the others. Networks for images are built by `cnn.py` from the descriptions in `networks/` and written as ONNX graphs by
`to_onnx.py`. Nothing here unpickles a file, but for the tensors of one, and a model's own code runs only where the user
said so.
"""
