"""Report of a plan: screen, page and JSON."""
