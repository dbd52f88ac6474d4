"""Profiles: the fastest options for a device, as measured, saved in a file.

The command ``nvmeio tune`` makes them; ``Handle.from_profile`` and ``NVMEIO_PROFILE`` use
them.
"""

from nvmeio._config.profile_files import (
    Choice,
    Profile,
    check_saving,
    load_profile,
    new_profile,
    profile_file,
    profiles_folder,
    read_profile,
    save_profile,
    saved_profiles,
)

__all__ = [
    "Choice",
    "Profile",
    "check_saving",
    "load_profile",
    "new_profile",
    "profile_file",
    "profiles_folder",
    "read_profile",
    "save_profile",
    "saved_profiles",
]
