"""Exporters, one destination a file: write it, load it again in other people's code, compare.

An exporter's constant `EXPORT` has `name`, `runtimes` (that read it), `fuses` (whether it gains from linears that are
stored as one), `Options`, and the functions `holds`, `accepts`, `write` and `check`; see `checkpoint.py`.
"""
