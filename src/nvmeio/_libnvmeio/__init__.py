"""The functions of the C library for Cython, a .pxd for each header; no Python code."""
