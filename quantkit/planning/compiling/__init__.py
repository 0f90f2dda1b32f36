"""What a compile takes: seconds, memory and disk, from sizes alone."""
