"""What people read: the summary on a terminal, the progress before it, and the model card in the bundle."""
