"""What all pages are made of: charts, axes, parts, words, templates; and progress on a terminal."""
