"""What is known before the work: `quantkit plan`, and `--dry-run` of a compile."""
