"""Call the case that the command line names."""

from pathlib import Path

from workloads.__main__ import main

SUBJECTS = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))

if __name__ == "__main__":
    main("cases", SUBJECTS)
