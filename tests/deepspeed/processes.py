"""Processes for the tests against the real DeepSpeed."""

import os
import socket
import subprocess
import sys

# Longer means a hang; the first use of an op compiles it, which takes minutes.
LIMIT_S = 600


def rank_environment():
    """Return the environment of the only rank of a training run."""
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
    """Run a command until it ends, and return the finished process."""
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
    """Run a command that must succeed, and return its output."""
    done = run(*command, env=env, folder=folder)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def run_python(*arguments, env=(), folder=None):
    """Run this Python, which must succeed, and return its output."""
    return run_well(sys.executable, *arguments, env=env, folder=folder)
