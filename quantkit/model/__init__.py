"""From a reference to blocks in memory: opening a model (`source`), streaming its layers, tracing their structure.

And its sizes without weights, and how quantized linears lie in files (`layouts`). Nothing here unpickles a file, but
for the tensors of one, and a model's own code runs only where the user said so.
"""
