"""Q/DQ pairs in a float graph: where they go, and how they are put in."""
