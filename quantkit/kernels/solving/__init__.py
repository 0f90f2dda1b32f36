"""The solvers' inner loops for a GPU (Triton): one launch each, whatever the size of the weight.

`choose` is GPTQ's pass over the columns, `descend` its sweeps, `search` lays a grid over each group, `losses` is what
rounding loses under many scalings of the inputs. Each is the twin of the loop of the same work in `passes/solvers/`,
which the tests hold it to. They are torch operators, so that they count as one operation and run on fake tensors.
"""
