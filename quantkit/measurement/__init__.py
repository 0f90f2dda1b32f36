"""Numbers with units, spread, device and versions: accuracy, size, latency; one row each."""
