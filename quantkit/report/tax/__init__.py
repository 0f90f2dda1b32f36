"""The dequantization tax: on a screen, as a page."""
