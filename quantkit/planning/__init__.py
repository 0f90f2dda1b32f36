"""Predictions before the work: shapes, memory, time, cost. Needs neither torch nor weights."""
