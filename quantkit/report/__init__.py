"""Reports for readers: terminal screens, HTML pages, Markdown cards, and the progress of a running command."""
