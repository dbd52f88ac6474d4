"""What the children of ``children.py`` do: ``-m workloads FUNCTION JSON-ARGUMENTS``.

A workload checks contents itself, and reports by lines of JSON how each step ended.
"""
