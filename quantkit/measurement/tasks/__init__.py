"""Tasks: a model's answers to items with a right one, by lm-eval's definitions, in quantkit's runtimes.

Original and quantized answer the same items. For each score of a task:

    recovery    score of the quantized / score of the original, with an interval over the pairs of items
    flips       items that only one side gets right, with McNemar's exact test
    floor       the same for two float runtimes: what differs there is no harm of a quantization
    one point   items that would show a loss of 0.01, at as many flips an item as were seen (`stats.shares.for_loss`)
"""
