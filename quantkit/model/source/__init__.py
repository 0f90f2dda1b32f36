"""A reference becomes tensors: a folder, GGUF, a package's file or an alias, checked, with none of its code run."""
