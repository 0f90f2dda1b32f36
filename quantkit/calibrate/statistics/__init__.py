"""What passes see of real life: statistics of each shared input, ranges, fixed scales, routing."""
