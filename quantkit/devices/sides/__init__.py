"""The two models of a measuring on a device, a kind of them a file: files, what is scored, rows of what came back."""
