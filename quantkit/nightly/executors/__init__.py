"""Where the builds of a night run."""
