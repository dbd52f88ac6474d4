"""Paths, and files that take the place of others."""
