"""Streams of bytes to and from files, with a bounded number in flight."""
