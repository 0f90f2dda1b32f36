"""`quantkit compare`: its sides, scores, times and flipped words."""
