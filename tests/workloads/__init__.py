"""Functions that child processes of tests run: ``-m workloads FUNCTION JSON-ARGUMENTS``.

A workload checks contents itself, and reports the result of each step as a line of JSON.
"""
