"""Profiles: saved in files, and used by handles."""

import dataclasses
import errno
import json
import logging
import os
import pathlib
import pickle
import pwd
import resource
import stat
import subprocess
import sys

import pytest

import nvmeio
from children import run_tool
from helpers import limit
from nvmeio._config import options as _options
from nvmeio._config.devices import device_of
from nvmeio._config.profile_files import (
    make_profiles_folder,
    profile_file,
    profiles_folder,
    read_profile,
    saved_profiles,
)
from nvmeio._native import handle as _handle
from nvmeio.profiles import (
    Choice,
    Profile,
    load_profile,
    new_profile,
    save_profile,
)

OPTIONS = {
    "engine": "threads",
    "bounce": "never",
    "block_size": 65536,
    "queue_depth": 9,
    "workers": 2,
}
BOTH, READ, WRITE = (
    Choice({**OPTIONS, "queue_depth": depth}, {"read_gb_per_s": 1.5, "rounds": [depth]})
    for depth in (9, 10, 11)
)

DEFAULTS = {
    "engine": "auto",
    "direct": "auto",
    "bounce": "auto",
    "block_size": 1 << 20,
    "queue_depth": 128,
    "workers": 1,
    "check_overlap": False,
}


@pytest.fixture(autouse=True)
def config(tmp_path, monkeypatch):
    """An empty configuration folder for one test, without variables of nvmeio."""
    for name in ("profile", *DEFAULTS):
        monkeypatch.delenv(f"NVMEIO_{name.upper()}", raising=False)
    folder = tmp_path / "configuration"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    return folder


@pytest.fixture
def profile(tmp_path):
    """A profile of tmp_path's device, not saved."""
    return new_profile(tmp_path, both=BOTH, read=READ, write=WRITE)


@pytest.fixture
def saved(profile):
    """The same profile, saved."""
    save_profile(profile)
    return profile


def chosen(handle):
    """Return the options of a handle, and close it."""
    with handle:
        # The property names the engine that "auto" has chosen.
        return handle.__reduce__()[1][1]


def properties_of(handle):
    """Return the properties of a handle, and close it."""
    with handle:
        return {name: getattr(handle, name) for name in DEFAULTS}


class TestFiles:
    def test_a_saved_profile_is_loaded(self, profile, tmp_path):
        assert load_profile(tmp_path) is None
        assert saved_profiles() == []
        file = save_profile(profile)
        assert saved_profiles() == [file]
        assert load_profile(tmp_path / "not" / "there") == read_profile(file) == profile

    def test_a_profile_has_its_device_and_date(self, profile, tmp_path):
        device = device_of(tmp_path)
        assert (profile.device, profile.description) == (device.identity, str(device))
        assert profile.nvmeio == nvmeio.__version__
        assert profile.kernel == os.uname().release
        assert profile.made.endswith("+00:00")

    def test_the_file_is_named_after_the_device(self, profile, config):
        file = save_profile(profile)
        assert file == config / "nvmeio" / "profiles" / f"{profile.device}.json"
        assert file == profile_file(profile.device)
        content = json.loads(file.read_text())
        assert content == {"version": 2, **dataclasses.asdict(profile)}

    def test_folders_are_private_to_the_user(self, profile, config):
        """The XDG Base Directory Specification requires that."""
        file = save_profile(profile)
        for folder in (config, config / "nvmeio", file.parent):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700

    def test_a_newer_profile_replaces_the_old_one(self, saved, tmp_path):
        newer = dataclasses.replace(saved, both=READ)
        save_profile(newer)
        assert load_profile(tmp_path) == newer
        assert len(saved_profiles()) == 1

    def test_a_full_disk_leaves_the_old_profile(self, saved, tmp_path):
        large = Choice(OPTIONS, {"note": "x" * 100_000})
        with (
            limit(resource.RLIMIT_FSIZE, 50_000),
            pytest.raises(OSError, match="File too large") as caught,
        ):
            save_profile(dataclasses.replace(saved, both=large))
        assert caught.value.errno == errno.EFBIG
        assert load_profile(tmp_path) == saved
        assert os.listdir(profiles_folder()) == [f"{saved.device}.json"]

    @pytest.mark.parametrize("value", ["", "relative/folder", None])
    def test_a_folder_that_is_not_absolute_is_ignored(self, monkeypatch, tmp_path, value):
        monkeypatch.setenv("HOME", str(tmp_path))
        if value is None:
            monkeypatch.delenv("XDG_CONFIG_HOME")
        else:
            monkeypatch.setenv("XDG_CONFIG_HOME", value)
        assert profiles_folder() == tmp_path / ".config" / "nvmeio" / "profiles"

    def test_other_files_are_no_profiles(self, saved):
        (profiles_folder() / ".nvmeio-1234.tmp").touch()
        (profiles_folder() / "README").touch()
        assert saved_profiles() == [profile_file(saved.device)]


def broken(change):
    """Return a function that makes the text of a broken profile."""

    def text(profile):
        content = {"version": 2, **dataclasses.asdict(profile)}
        change(content)
        return json.dumps(content)

    return text


BROKEN = {
    "no JSON": (lambda _: '{"version": ', "Expecting value"),
    "too deep": (lambda _: "[" * 100_000, "while decoding a JSON array"),
    "no object": (lambda _: "[1]", "it is not a JSON object"),
    "version": (broken(lambda c: c.update(version=1)), "version is 1; this nvmeio reads 2"),
    "no device": (broken(lambda c: c.pop("device")), "must not have them: ['device']"),
    "other device": (broken(lambda c: c.update(device="x")), "device is 'x'; it must be "),
    "unknown": (broken(lambda c: c.update(more=5)), "must not have them: ['more']"),
    "no choice": (broken(lambda c: c.update(read=5)), "read is not a JSON object"),
    "no option": (
        broken(lambda c: c["write"]["options"].pop("bounce")),
        "write.options lacks these, or must not have them: ['bounce']",
    ),
    "limit": (
        broken(lambda c: c["both"]["options"].update(block_size=0)),
        "both.options.block_size is 0; it must be from 1 to 1073741824",
    ),
    "type": (
        broken(lambda c: c["both"]["options"].update(queue_depth="8")),
        "both.options.queue_depth is '8'; it must be an integer",
    ),
    "twice": (lambda p: '{"a": 1, "a": 2}', "'a' comes twice"),
    "word": (
        broken(lambda c: c["both"]["options"].update(engine="posix")),
        "both.options.engine is 'posix'; it must be one of auto, io_uring",
    ),
}


@pytest.mark.parametrize(("text", "words"), BROKEN.values(), ids=BROKEN)
def test_the_error_for_a_broken_profile_names_file_and_field(
    saved, tmp_path, monkeypatch, text, words
):
    """With NVMEIO_PROFILE too, because its user does not want the defaults instead."""
    file, content = profile_file(saved.device), text(saved)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    for variable in ("", "auto", str(tmp_path)):
        monkeypatch.setenv("NVMEIO_PROFILE", variable)
        with pytest.raises(ValueError, match=r"the profile .* cannot be used: ") as caught:
            nvmeio.Handle() if variable else nvmeio.Handle.from_profile(tmp_path)
        assert repr(str(file)) in str(caught.value)
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"both": Choice({**OPTIONS, "block_size": 0}, {})}, ValueError, "block_size is 0"),
        ({"read": Choice({"block_size": 1}, {})}, ValueError, "read.options lacks"),
        ({"read": Choice(OPTIONS, {"x": float("nan")})}, ValueError, "JSON"),
        ({"read": Choice(OPTIONS, {"x": object()})}, TypeError, "object"),
        ({"device": "../elsewhere"}, ValueError, "device is '../elsewhere'"),
    ],
)
def test_a_profile_that_could_not_be_loaded_is_not_saved(
    saved, tmp_path, change, error, words
):
    with pytest.raises(error, match=words):
        save_profile(dataclasses.replace(saved, **change))
    assert load_profile(tmp_path) == saved
    assert saved_profiles() == [profile_file(saved.device)]


def test_a_folder_of_a_read_only_mount_is_refused(profile, loop_mount, monkeypatch):
    mounted = loop_mount("ext4", 64 << 20)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(mounted))
    assert make_profiles_folder() == mounted / "nvmeio" / "profiles"
    run_tool("mount", "-o", "remount,ro", mounted)
    with pytest.raises(OSError, match=str(mounted)) as raised:
        make_profiles_folder()
    assert raised.value.errno == errno.EROFS, "as the kernel says it"


def test_only_a_profile_is_saved(saved, tmp_path):
    with pytest.raises(TypeError, match="profile is 3; it must be a Profile"):
        save_profile(3)
    assert load_profile(tmp_path) == saved


class Subclass(nvmeio.Handle):
    """A handle whose constructor has more arguments."""

    def __init__(self, *, name="", **options):
        super().__init__(**options)
        self.name = name


class TestFromProfile:
    @pytest.mark.parametrize("op", ["both", "read", "write"])
    def test_each_kind_of_work_has_its_options(self, saved, tmp_path, op):
        handle = nvmeio.Handle.from_profile(tmp_path / "none" / "yet", op=op)
        assert handle.engine == "threads"
        assert chosen(handle) == {**DEFAULTS, **getattr(saved, op).options}

    def test_the_environment_comes_before_the_profile(self, saved, tmp_path, monkeypatch):
        monkeypatch.setenv("NVMEIO_BLOCK_SIZE", "4096")
        monkeypatch.setenv("NVMEIO_ENGINE", "sync")
        handle = nvmeio.Handle.from_profile(tmp_path, block_size=None, bounce=None)
        found = {"engine": "sync", "block_size": 4096}
        assert chosen(handle) == {**DEFAULTS, **saved.both.options, **found}

    def test_from_profile_makes_subclasses(self, saved, tmp_path):
        handle = Subclass.from_profile(tmp_path, op="write", name="mine")
        assert (type(handle), handle.name) == (Subclass, "mine")
        assert chosen(handle) == {**DEFAULTS, **saved.write.options}

    def test_a_device_without_a_profile_is_named(self, tmp_path):
        device = device_of(tmp_path)
        with pytest.raises(FileNotFoundError) as caught:
            nvmeio.Handle.from_profile(tmp_path)
        assert caught.value.errno == errno.ENOENT
        assert caught.value.filename == str(profile_file(device.identity))
        assert f"no profile of {device}, the device of {str(tmp_path)!r};" in str(
            caught.value
        )
        assert "`nvmeio tune DIR`" in str(caught.value)

    @pytest.mark.parametrize(
        ("options", "error", "words"),
        [
            ({"op": "copy"}, ValueError, "op is 'copy'; it must be one of both, read"),
            ({"depth": 3}, TypeError, "unexpected keyword argument 'depth'"),
            ({"queue_depth": 0}, ValueError, "^queue_depth is 0; it must be from 1 to"),
            ({"check_overlap": "no"}, TypeError, "check_overlap is 'no'"),
        ],
    )
    def test_mistakes_are_named(self, saved, tmp_path, options, error, words):
        with pytest.raises(error, match=words):
            nvmeio.Handle.from_profile(tmp_path, **options)


@pytest.fixture
def refused(monkeypatch):
    """A process in which the engine threads is refused, as io_uring is in containers."""
    found = {"threads": {"works": False, "reason": "refused here"}}
    monkeypatch.setattr(_handle, "engines", lambda: found)
    _options._engine_once.cache_clear()
    yield
    _options._engine_once.cache_clear()


@pytest.mark.usefixtures("refused")
class TestRefusedEngine:
    def test_a_refused_engine_is_replaced_with_one_warning(
        self, saved, tmp_path, monkeypatch, caplog
    ):
        monkeypatch.setenv("NVMEIO_PROFILE", "auto")
        for handle in (
            nvmeio.Handle.from_profile(tmp_path),
            nvmeio.Handle.from_profile(tmp_path, op="read"),
            nvmeio.Handle(queue_depth=9),
        ):
            options = chosen(handle)
            assert (options["engine"], options["bounce"]) == ("auto", "never")
        told = [record.getMessage() for record in caplog.records]
        assert told == ["the profile's engine threads cannot be used: refused here"]

    def test_a_refused_engine_does_not_matter_if_another_is_requested(
        self, saved, tmp_path, caplog
    ):
        handle = nvmeio.Handle.from_profile(tmp_path, engine="sync")
        assert chosen(handle)["engine"] == "sync"
        assert caplog.records == []


class TestEnvironment:
    @pytest.fixture
    def another(self, saved):
        """A second profile, of a device that is not present."""
        choice = Choice({**OPTIONS, "queue_depth": 77}, {})
        save_profile(Profile("another", "", "", "", "", choice, choice, choice))

    @pytest.fixture
    def auto(self, monkeypatch):
        monkeypatch.setenv("NVMEIO_PROFILE", "auto")

    @pytest.mark.usefixtures("auto")
    def test_the_only_profile_is_used(self, saved, monkeypatch):
        monkeypatch.chdir("/proc")
        for handle in (nvmeio.Handle(), nvmeio.aio_handle().handle):
            assert properties_of(handle) == {**DEFAULTS, **saved.both.options}

    @pytest.mark.usefixtures("auto", "another")
    def test_of_several_profiles_the_current_folders_is_used(
        self, saved, tmp_path, monkeypatch, caplog
    ):
        caplog.set_level(logging.INFO, "nvmeio")
        monkeypatch.chdir(tmp_path)
        assert chosen(nvmeio.Handle()) == {**DEFAULTS, **saved.both.options}
        assert caplog.records == []
        monkeypatch.chdir("/proc")
        assert chosen(nvmeio.Handle()) == DEFAULTS

    @pytest.mark.usefixtures("auto")
    def test_without_a_profile_the_defaults_are_used_with_one_warning(self, caplog):
        caplog.set_level(logging.INFO, "nvmeio")
        assert chosen(nvmeio.Handle()) == chosen(nvmeio.Handle()) == DEFAULTS
        assert [record.levelno for record in caplog.records] == [logging.INFO]
        assert "of 0 profiles" in caplog.text
        assert str(profiles_folder()) in caplog.text

    @pytest.mark.usefixtures("auto")
    def test_a_user_without_a_home_gets_the_defaults(self, tmp_path, monkeypatch, caplog):
        caplog.set_level(logging.INFO, "nvmeio")
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
        assert chosen(nvmeio.Handle()) == DEFAULTS
        monkeypatch.delenv("XDG_CONFIG_HOME")
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
        assert chosen(nvmeio.Handle()) == DEFAULTS
        first, second = [record.getMessage() for record in caplog.records]
        assert "Not a directory" in first
        assert "the user has no home" in second
        monkeypatch.setenv("NVMEIO_PROFILE", str(tmp_path))
        with pytest.raises(FileNotFoundError, match="the user has no home"):
            nvmeio.Handle()

    @pytest.mark.usefixtures("another")
    def test_a_path_chooses_the_profile_of_its_device(self, saved, tmp_path, monkeypatch):
        monkeypatch.setenv("NVMEIO_PROFILE", str(tmp_path))
        monkeypatch.chdir("/proc")
        assert chosen(nvmeio.Handle()) == {**DEFAULTS, **saved.both.options}

    @pytest.mark.usefixtures("saved")
    def test_a_missing_path_is_an_error(self, tmp_path, monkeypatch):
        monkeypatch.setenv("NVMEIO_PROFILE", str(tmp_path / "typo"))
        with pytest.raises(FileNotFoundError, match="NVMEIO_PROFILE is a path") as caught:
            nvmeio.Handle()
        assert caught.value.filename == str(tmp_path / "typo")

    @pytest.mark.usefixtures("saved")
    def test_a_path_on_a_device_without_a_profile_is_an_error(self, monkeypatch):
        monkeypatch.setenv("NVMEIO_PROFILE", "/proc")
        with pytest.raises(FileNotFoundError, match="of NVMEIO_PROFILE='/proc'; make"):
            nvmeio.Handle()

    @pytest.mark.usefixtures("saved")
    @pytest.mark.parametrize("value", ["1", "on", "AUTO", "some/folder", "~", "auto "])
    def test_other_values_are_refused(self, monkeypatch, value):
        monkeypatch.setenv("NVMEIO_PROFILE", value)
        words = f"NVMEIO_PROFILE is {value!r}; it must be auto, or an absolute path"
        with pytest.raises(ValueError, match=words):
            nvmeio.Handle()

    @pytest.mark.usefixtures("saved")
    def test_an_empty_value_means_no_profile(self, monkeypatch):
        monkeypatch.setenv("NVMEIO_PROFILE", "")
        assert chosen(nvmeio.Handle()) == DEFAULTS

    @pytest.mark.usefixtures("auto")
    def test_arguments_and_other_variables_come_first(self, saved, monkeypatch):
        found = {"engine": "sync", "block_size": 4096}
        for name, value in {**found, "queue_depth": 5}.items():
            monkeypatch.setenv(f"NVMEIO_{name.upper()}", str(value))
        passed = {"queue_depth": 3, "bounce": "auto"}
        assert chosen(nvmeio.Handle(**passed)) == {
            **DEFAULTS,
            **saved.both.options,
            **found,
            **passed,
        }

    @pytest.mark.usefixtures("auto")
    def test_a_profile_saved_later_is_used(self, profile):
        assert chosen(nvmeio.Handle()) == DEFAULTS
        save_profile(profile)
        assert chosen(nvmeio.Handle()) == {**DEFAULTS, **profile.both.options}

    @pytest.mark.usefixtures("saved")
    def test_a_pickled_handle_keeps_its_options(self, monkeypatch):
        with nvmeio.Handle() as handle:
            data = pickle.dumps(handle)
        monkeypatch.setenv("NVMEIO_PROFILE", "auto")
        assert chosen(pickle.loads(data)) == DEFAULTS

    @pytest.mark.usefixtures("auto")
    def test_the_op_keeps_deepspeeds_defaults(self, saved):
        """Only engine and bounce come from the profile, which DeepSpeed does not know."""
        for passed in ({}, {"engine": "sync", "bounce": "always"}):
            found = properties_of(nvmeio.deepspeed.aio_handle(**passed).handle)
            own = {name: saved.both.options[name] for name in ("engine", "bounce")}
            assert found == {**DEFAULTS, **own, **passed}


def test_an_unreadable_profile_is_an_error(saved, tmp_path):
    file = profile_file(saved.device)
    file.unlink()
    file.mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        nvmeio.Handle.from_profile(tmp_path)
    assert pathlib.Path(caught.value.filename) == file


def test_modules_of_profiles_are_loaded_at_first_use(tmp_path):
    program = (
        "import sys, nvmeio\n"
        "nvmeio.Handle().close()\n"
        "names = ('devices', 'lookup', 'profile_files')\n"
        "parts = {f'nvmeio._config.{name}' for name in names}\n"
        "assert not parts & set(sys.modules), parts & set(sys.modules)\n"
        "try:\n"
        f"    nvmeio.Handle.from_profile({str(tmp_path)!r})\n"
        "except FileNotFoundError:\n"
        "    assert parts <= set(sys.modules)\n"
        "    print('ready')\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (run.stdout, run.stderr) == ("ready\n", "")
