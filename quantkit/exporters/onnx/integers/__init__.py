"""Products in integers: weights and inputs both in 8 bits."""
