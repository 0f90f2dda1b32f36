"""Opening of a reference: a folder, a GGUF file, a package's file or an alias, checked, with none of its code run."""
