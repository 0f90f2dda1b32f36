"""A night as it runs: its builds, their bundles, their times, each in a process of its own."""
