"""Many jobs, each in a process of its own, on this machine or on a Ray cluster: nights, batches, `compile --on`."""
