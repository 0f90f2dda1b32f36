"""What users wait for and what tokens cost: traffic, continuous batching, prices."""
