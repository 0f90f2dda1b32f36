"""From the rows of a night to decisions, their sentences, and what a gate tells other programs."""
