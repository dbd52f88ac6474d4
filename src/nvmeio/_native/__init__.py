"""All Cython: the C library as objects of Python."""
