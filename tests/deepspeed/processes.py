"""Processes for the tests against the real DeepSpeed."""

import os
import socket
import subprocess
import sys

# What takes longer hangs; an op that is compiled at first takes minutes.
LIMIT_S = 600


def rank_environment():
    """Return the variables of the only rank of a training."""
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }


def free_port():
    """Return a port that nobody listened on a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run(*command, env=(), folder=None):
    """Run a command to its end, and return what became of it."""
    return subprocess.run(
        [*map(str, command)],
        env={**os.environ, **dict(env)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )


def run_well(*command, env=(), folder=None):
    """Run a command that must go well, and return what it printed."""
    done = run(*command, env=env, folder=folder)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def run_python(*arguments, env=(), folder=None):
    """Run this Python, which must go well, and return what it printed."""
    return run_well(sys.executable, *arguments, env=env, folder=folder)
