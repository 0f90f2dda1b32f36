"""The recipe on one block, first: what fails later fails now."""
