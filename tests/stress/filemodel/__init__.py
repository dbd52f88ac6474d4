"""The model that random operations are checked by: plans, memory with fences, and a file.

`plans` draws what is to be done, `model` foretells what must come of it, `inflight` holds
what may yet come either way, `fences` sees what is written beside the memory that was lent,
`regimes` has a file system fail.
"""
