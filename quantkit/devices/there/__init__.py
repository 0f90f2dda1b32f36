"""What runs on a device: no torch, nothing beyond the small install."""
