"""Single products on a device: made here, timed there, judged here."""
