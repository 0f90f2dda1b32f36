"""What the benchmark scripts share. Nothing here imports torch: what is measured runs in fresh processes."""
