"""Calls the trial that the command line names."""

from workloads.__main__ import main

SUBJECTS = ("model",)

if __name__ == "__main__":
    main("trials", SUBJECTS)
