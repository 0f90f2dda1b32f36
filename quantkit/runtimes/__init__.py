"""Runtimes, one a file: load a bundle, run it, say what was used."""
