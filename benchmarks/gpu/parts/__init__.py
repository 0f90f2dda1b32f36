"""What `run_all.py` is made of. Needs torch, Triton and NumPy, and of quantkit what needs no more."""
