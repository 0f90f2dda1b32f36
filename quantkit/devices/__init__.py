"""Other machines: what is measured where it will run, with the figures in this machine's bundle."""
