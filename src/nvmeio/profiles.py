"""Profiles: the options that were measured to be best on a device, kept in a file.

``nvmeio tune`` makes them; ``Handle.from_profile`` and ``NVMEIO_PROFILE`` use them.
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
