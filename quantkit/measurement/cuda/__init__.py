"""What it takes to time products on a GPU: random weights, the ways to multiply, a clock, the device and its ceilings.

torch, Triton and NumPy are all that it needs: `benchmarks/gpu/run_all.py` runs it where there is no more.
"""
