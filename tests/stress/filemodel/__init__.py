"""The model against which random operations are checked.

`plans` draws the operations, `model` predicts their results, `inflight` knows the possible
results of transfers in flight, `fences` detects writes beside the borrowed memory,
`regimes` makes a file system fail.
"""
