"""Control groups, which limit the resources of a process."""

import os
from pathlib import Path

import pytest


@pytest.fixture
def control_group():
    """A function that makes a control group, and returns a command prefix to run in it.

    Its arguments are the controller, and for each version of control groups a dict from
    files to values.  If one is needed, there is no excuse.
    """
    made = []

    def make(controller, version_1, version_2, needed=False):
        top = Path("/sys/fs/cgroup")
        old = (top / controller).is_dir()
        folder = (top / controller if old else top) / f"nvmeio-test-{os.getpid()}"
        try:
            folder.mkdir()
            made.append(folder)
            for name, value in (version_1 if old else version_2).items():
                (folder / name).write_text(str(value))
        except OSError as error:
            excuse = pytest.fail if needed else pytest.skip
            excuse(f"control groups cannot be made here: {error.strerror}")
        enter = f'echo $$ > {folder}/cgroup.procs && exec "$@"'
        return ["sh", "-c", enter, "sh"]

    yield make
    for folder in made:
        folder.rmdir()
