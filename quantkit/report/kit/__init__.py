"""Building blocks of all reports: charts, tables, words, templates, and the progress of a command."""
