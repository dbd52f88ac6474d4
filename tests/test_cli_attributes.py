"""Attributes of a copy, and who may read it before it is complete."""

import errno
import os
import shutil
import stat
import struct

import pytest

from commands import nvmeio
from copies import HELD, running, temporary_in
from workloads.common import Faults

ACCESS, DEFAULT = "system.posix_acl_access", "system.posix_acl_default"


def give_list(path, kind, *, user, named, group, mask, others):
    """Set an access control list with an entry for user 12345."""
    # The version; then tag, permissions and id of each entry: linux/posix_acl_xattr.h.
    entries = [(1, user), (2, named), (4, group), (16, mask), (32, others)]
    value = struct.pack("<I", 2) + b"".join(
        struct.pack("<HHI", tag, bits, 12345 if tag == 2 else 0xFFFFFFFF)
        for tag, bits in entries
    )
    try:
        os.setxattr(path, kind, value)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        pytest.skip("the file system has no access control lists")


def list_of(path):
    """Return a file's access control list, or b""."""
    return os.getxattr(path, ACCESS) if ACCESS in os.listxattr(path) else b""


@pytest.mark.parametrize(
    ("mode", "umask", "copied"),
    [
        (0o644, 0o022, 0o644),
        (0o666, 0o027, 0o640),
        (0o4751, 0, 0o751),
        (0o400, 0, 0o400),
    ],
)
def test_a_new_copy_has_the_permission_bits_of_the_source(
    source, tmp_path, mode, umask, copied
):
    source.chmod(mode)
    done = nvmeio("cp", source, tmp_path / "copy", umask=umask)
    assert done.status == 0
    assert stat.S_IMODE(os.stat(tmp_path / "copy").st_mode) == copied


def test_a_copy_over_a_file_keeps_that_files_mode(source, tmp_path):
    (tmp_path / "copy").touch()
    (tmp_path / "copy").chmod(0o2751)
    assert nvmeio("cp", source, tmp_path / "copy").status == 0
    assert stat.S_IMODE(os.stat(tmp_path / "copy").st_mode) == 0o2751
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_copy_over_a_file_keeps_that_files_owner(source, tmp_path):
    (tmp_path / "copy").touch()
    os.chown(tmp_path / "copy", 12345, 54321)
    (tmp_path / "copy").chmod(0o6755)
    assert nvmeio("cp", source, tmp_path / "copy").status == 0
    status = os.stat(tmp_path / "copy")
    assert (status.st_uid, status.st_gid) == (12345, 54321)
    assert stat.S_IMODE(status.st_mode) == 0o6755


@pytest.mark.parametrize("verify", [[], ["--verify"]], ids=["", "verified"])
def test_preserve_keeps_mode_times_and_attributes(source, tmp_path, verify):
    source.chmod(0o4751)
    os.setxattr(source, "user.colour", b"blue")
    # Read the file now, so that a later read does not change the access time.
    os.utime(source, ns=(1_600_000_000_123_456_789, 1_500_000_000_987_654_321))
    done = nvmeio("cp", "-p", *verify, source, tmp_path / "copy")
    status = os.stat(tmp_path / "copy")
    assert (done.status, "not kept" in done.err) == (0, False)
    assert stat.S_IMODE(status.st_mode) == 0o4751
    assert status.st_mtime_ns == 1_500_000_000_987_654_321
    assert status.st_atime_ns == 1_600_000_000_123_456_789
    assert os.getxattr(tmp_path / "copy", "user.colour") == b"blue"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_preserve_keeps_the_owner(source, tmp_path):
    os.chown(source, 12345, 54321)
    assert nvmeio("cp", "-p", source, tmp_path / "copy").status == 0
    status = os.stat(tmp_path / "copy")
    assert (status.st_uid, status.st_gid) == (12345, 54321)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_attributes_that_cannot_be_kept_are_reported(source, tmp_path):
    """Without CAP_CHOWN root cannot change owners, like any user."""
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed")
    os.chown(source, 12345, 54321)
    source.chmod(0o4755)
    prefix = ["setpriv", "--bounding-set", "-chown", "--inh-caps", "-chown"]
    done = nvmeio("cp", "-p", source, tmp_path / "copy", prefix=prefix)
    assert done.status == 0
    assert done.err.endswith("\nnot kept, because the system refuses it: owner\n")
    status = os.stat(tmp_path / "copy")
    assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (0, 0o755)


def test_a_copy_over_a_file_keeps_its_access_control_list(source, tmp_path):
    """The group has no access, which the permission bits alone do not show."""
    (tmp_path / "copy").touch()
    give_list(tmp_path / "copy", ACCESS, user=6, named=6, group=0, mask=6, others=0)
    wanted = list_of(tmp_path / "copy")
    assert nvmeio("cp", source, tmp_path / "copy").status == 0
    assert list_of(tmp_path / "copy") == wanted
    assert stat.S_IMODE(os.stat(tmp_path / "copy").st_mode) == 0o660


@pytest.mark.parametrize("has_one", [True, False])
def test_preserve_copies_the_sources_list_to_any_folder(source, tmp_path, has_one):
    everything = {"user": 7, "named": 7, "group": 7, "mask": 7, "others": 7}
    give_list(tmp_path, DEFAULT, **everything)
    source.chmod(0o640)
    if has_one:
        give_list(source, ACCESS, user=6, named=4, group=0, mask=4, others=0)
    assert nvmeio("cp", "-p", source, tmp_path / "copy").status == 0
    assert list_of(tmp_path / "copy") == list_of(source)
    assert stat.S_IMODE(os.stat(tmp_path / "copy").st_mode) == 0o640


def test_if_a_list_cannot_be_kept_the_group_gets_no_access(source, faulty):
    give_list(source, ACCESS, user=6, named=6, group=0, mask=6, others=0)
    done = nvmeio("cp", "-p", source, faulty / "copy")
    assert done.status == 0
    assert done.err.endswith(f"\nnot kept, because the system refuses it: {ACCESS}\n")
    assert stat.S_IMODE(os.stat(faulty / "copy").st_mode) == 0o600


def test_the_folders_default_list_gives_no_access_to_an_unfinished_copy(
    slow_source, tmp_path
):
    give_list(tmp_path, DEFAULT, user=7, named=7, group=7, mask=7, others=7)
    Faults(slow_source).set(read=HELD)
    with running(slow_source, tmp_path / "copy"):
        # The group bits are the list's mask.
        mode = stat.S_IMODE(temporary_in(tmp_path).stat().st_mode)
        Faults(slow_source).set()
    assert mode == 0o600


def test_an_unfinished_copy_is_private(slow_source, tmp_path):
    Faults(slow_source).set(read=HELD)
    with running(slow_source, tmp_path / "copy", umask=0):
        temporary = temporary_in(tmp_path)
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o600
        Faults(slow_source).set()
    assert stat.S_IMODE(os.stat(tmp_path / "copy").st_mode) == 0o644
