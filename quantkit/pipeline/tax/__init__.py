"""`quantkit tax`: its question, and the sweeps that answer it."""
