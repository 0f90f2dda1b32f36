"""What is done with a finished bundle: measured, exported once more, reloaded, its engines built and inspected."""
