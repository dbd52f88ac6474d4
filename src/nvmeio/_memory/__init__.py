"""Callers' memory: strides, overlaps, tensor libraries."""
