"""Two versions of a model: on a screen, as a page, in words."""
