"""All Cython modules: the C library's objects as Python objects."""
