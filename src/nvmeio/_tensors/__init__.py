"""Tensors of numpy and torch: the names of dtypes, memory, bytes, indices."""
