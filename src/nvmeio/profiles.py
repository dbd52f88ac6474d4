"""Profiles: the fastest options for a device, as measured, saved in a file.

The command ``nvmeio tune`` makes them; ``Handle.from_profile`` and ``NVMEIO_PROFILE`` use
them.
"""

from nvmeio._config.profile_files import (
    Choice,
    Profile,
    load_profile,
    new_profile,
    save_profile,
)

__all__ = [
    "Choice",
    "Profile",
    "load_profile",
    "new_profile",
    "save_profile",
]
