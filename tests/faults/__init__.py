"""What a disk, a signal or another process can do to work that writes, each fault by its name."""
