"""Callers' memory: strides, overlaps, libraries of tensors."""
