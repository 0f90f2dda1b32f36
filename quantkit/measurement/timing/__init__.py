"""Times of two sides in turns: bundles, engines, graphs, and the rows that follow from them."""
