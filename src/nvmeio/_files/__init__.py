"""Paths, directories, locks, and files that replace others."""
