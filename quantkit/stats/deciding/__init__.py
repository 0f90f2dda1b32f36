"""Better, same, worse or inconclusive: evidence of several kinds, and one decision."""
