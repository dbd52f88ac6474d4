"""What can be done about something that keeps nvmeio from being fast."""

from dataclasses import dataclass

__all__ = ["REBUILD", "SEVERITIES", "Remedy", "Step", "as_root"]

# In the order in which they are told: with the first nothing is fast, with the second
# something is slower than it could be, and the third is good to know.
SEVERITIES = ("broken", "slow", "hint")

# In a checkout or an unpacked sdist.  pip would take a wheel that it has built and kept.
REBUILD = "pip install --force-reinstall --no-deps --no-cache-dir ."


@dataclass(frozen=True)
class Step:
    """A part of a remedy.

    Attributes
    ----------
    text : str
        What is done, or where; ends with a colon where commands follow.
    commands : tuple of str
        Lines for a shell or for a file, as `text` says.
    """

    text: str
    commands: tuple[str, ...] = ()


@dataclass(frozen=True)
class Remedy:
    """Something that is not as it should be, and what helps.

    Attributes
    ----------
    key : str
        Names the problem; stays the same from release to release.
    severity : {"broken", "slow", "hint"}
        What the problem costs.
    problem : str
        What is wrong, as a clause.
    steps : tuple of Step
        What to do; where there are several, one of them or all, as they say.
    path : str
        The one that is concerned; "" where it is the machine.
    """

    key: str
    severity: str
    problem: str
    steps: tuple[Step, ...]
    path: str = ""


def as_root(uid: int, command: str) -> str:
    """Return a command as a user has to type it that needs to be root for it.

    Parameters
    ----------
    uid : int
        Of the user.
    command : str
        What root would type.

    Returns
    -------
    str
        The same, or with sudo in front.
    """
    return command if uid == 0 else f"sudo {command}"
