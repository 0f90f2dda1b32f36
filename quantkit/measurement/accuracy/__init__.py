"""Distance of a model from its original: by position, by item, by layer, by context."""
