"""Structure of a model, found by running it: blocks, shared inputs, folds, skips, the residual stream, experts."""
