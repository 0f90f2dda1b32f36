"""A plan: on a screen, as a page, as JSON."""
