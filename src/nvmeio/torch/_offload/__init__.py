"""Optimizer states in files: which there are, where they lie, and how they move."""
