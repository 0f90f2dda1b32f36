"""The page and the screen of a search for mixed precision."""
