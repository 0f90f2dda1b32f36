"""Inner loops of the solvers for a GPU (Triton), one launch each for a weight of any size.

`choose` is GPTQ's pass over the columns, `descend` its sweeps, `search` finds a grid for each group, `losses` measures
rounding under many scalings of the inputs. Each equals the loop of the same work in `passes/solvers/`, as tests verify.
They are torch operators, so that each counts as one operation and runs on fake tensors.
"""
