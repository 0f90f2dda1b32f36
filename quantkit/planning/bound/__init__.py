"""The least time of a step on a target, the forecast that measurements make of it, and the memory it needs."""
