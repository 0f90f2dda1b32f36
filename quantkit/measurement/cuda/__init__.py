"""Time products on a GPU: random weights, ways to multiply, a clock, the device and its ceilings.

Only torch, Triton and NumPy are needed: `benchmarks/gpu/run_all.py` runs where nothing else is installed.
"""
