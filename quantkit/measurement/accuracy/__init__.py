"""How far a model has moved from its original: by position, by item, by layer, by context."""
