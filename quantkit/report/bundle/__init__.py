"""The report of a bundle: page, model card, and what terminal and page share."""
