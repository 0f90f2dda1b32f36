"""Time products on a GPU: the device and its ceilings, random weights, and the implementations to compare.

Only torch, Triton and NumPy are needed: `benchmarks/gpu/run_all.py` runs where nothing else is installed.
"""
