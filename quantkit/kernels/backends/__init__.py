"""Other people's kernels, one library a file: optional, imported where they are used."""
