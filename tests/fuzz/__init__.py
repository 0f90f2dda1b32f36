"""Mutants of every kind of file that quantkit reads, and what becomes of them."""
