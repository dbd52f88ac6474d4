"""Weights that stay on a drive: their order of use, their memory, and their tensors."""
