"""Report of a bundle: its page, its model card and its screen."""
