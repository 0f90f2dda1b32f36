"""Programs that are sent to a device and run there by its Python: of the standard library alone, one request each.

A module has `main(asked)`, which answers what JSON has, or itself writes to standard output. What comes after the
program on standard input is its data. Nothing of quantkit needs to be there.
"""
