"""Models: opening them (`source`), streaming their blocks, tracing their structure, their sizes, and storage layouts.

Nothing here unpickles a file, except the tensors of one format, and a model's own code runs only if the user allows it.
"""
