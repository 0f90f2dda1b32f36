"""Q/DQ pairs in a float graph: placement and insertion."""
