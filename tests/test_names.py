"""Public names: completion, and suggestions for misspelled keywords."""

import importlib
import inspect
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import nvmeio
import nvmeio.torch


def test_completion_offers_only_public_names():
    script = "import nvmeio, nvmeio.torch, nvmeio.profiles; print(*dir(nvmeio))"
    offered = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()
    modules = {"aio", "checkpoint", "deepspeed", "profiles", "safetensors", "torch"}
    assert set(offered) == {*nvmeio.__all__, *modules, "__version__"}
    for name in offered:
        is_module = isinstance(getattr(nvmeio, name), types.ModuleType)
        assert is_module == (name in modules)


def test_a_module_without_an_underscore_has_only_public_names():
    top = Path(nvmeio.__file__).parent
    shown = {}
    for path in [*top.glob("*.py"), *top.glob("torch/*.py"), *top.glob("deepspeed/*.py")]:
        # The packages that these plug into may not be installed.
        plugs_in = path.stem in {"lightning", "megatron", "torch_checkpointing"}
        if not path.stem.startswith("_") and not plugs_in:
            package = ".".join(["nvmeio", *path.relative_to(top).parent.parts])
            module = importlib.import_module(f"{package}.{path.stem}")
            offered = importlib.import_module(package).__all__
            shown[path.stem] = {*module.__all__} - {*offered}
    # Modules that are public themselves, and return types of futures.py.
    assert shown.pop("aio") == {"append", "flush", "getitem", "setitem"}
    assert shown.pop("profiles") == {*nvmeio.profiles.__all__}
    assert shown.pop("futures") == {"Completions", "Waited"}
    assert shown
    assert not any(shown.values()), shown


def test_public_modules_are_imported_on_access():
    script = "import nvmeio; print(nvmeio.profiles.load_profile.__name__)"
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


CALLS = {
    "Handle": (lambda **k: nvmeio.Handle(**k), "intra_op_parallelism", "workers"),
    "Handle.read": (
        lambda **k: nvmeio.default_handle().read(b"", "x", **k),
        "file_offset",
        "offset",
    ),
    "Handle.submit_write": (
        lambda **k: nvmeio.default_handle().submit_write(b"", **k),
        "filename",
        "file",
    ),
    "Handle.gather": (
        lambda **k: nvmeio.default_handle().gather("x", [], 1, b"", **k),
        "out_offset",
        "out_offsets",
    ),
    # A required argument under a wrong name gets a suggestion too, not only "missing".
    "Handle.write": (
        lambda **k: nvmeio.default_handle().write(file="x", **k),
        "array",
        "buffer",
    ),
    "Handle.submit_fsync": (
        lambda **k: nvmeio.default_handle().submit_fsync(**k),
        "filename",
        "file",
    ),
    "Handle.submit_scatter": (
        lambda **k: nvmeio.default_handle().submit_scatter("x", sizes=1, buffer=b"", **k),
        "offset",
        "offsets",
    ),
    "Handle.read_many": (
        lambda **k: nvmeio.default_handle().read_many(**k),
        "item",
        "items",
    ),
    "Handle.from_profile": (
        lambda **k: nvmeio.Handle.from_profile(engine="sync", **k),
        "filename",
        "path",
    ),
    "Handle.drain": (
        lambda **k: nvmeio.default_handle().drain(**k),
        "timeout_s",
        "timeout",
    ),
    "File": (lambda **k: nvmeio.File("x", **k), "dirct", "direct"),
    "nvmeio.File": (lambda **k: nvmeio.File(**k), "filename", "path"),
    "read_into": (lambda **k: nvmeio.read_into(b"", "x", **k), "file_offset", "offset"),
    "write_file": (lambda **k: nvmeio.write_file(b"", "x", **k), "atomc", "atomic"),
    "load": (lambda **k: nvmeio.load(**k), "filename", "path"),
    "save": (lambda **k: nvmeio.save("x", [1], **k), "synch", "sync"),
    "empty": (lambda **k: nvmeio.empty(3, **k), "pinned", "pin_memory"),
    "torch.empty": (lambda **k: nvmeio.torch.empty(3, **k), "pinned", "pin_memory"),
    "wait": (lambda **k: nvmeio.wait([], **k), "timeout_s", "timeout"),
    "as_completed": (lambda **k: nvmeio.as_completed([], **k), "timeout_s", "timeout"),
    "ArrayFile": (lambda **k: nvmeio.ArrayFile("x", **k), "handel", "handle"),
    "aio_handle": (lambda **k: nvmeio.aio_handle(**k), "workers", "intra_op_parallelism"),
    "aio_handle.read": (
        lambda **k: nvmeio.aio_handle().read(b"", "x", **k),
        "offset",
        "file_offset",
    ),
    "aio_handle.async_pread": (
        lambda **k: nvmeio.aio_handle().async_pread(filename="x", **k),
        "bufer",
        "buffer",
    ),
    "aio_handle.new_cpu_locked_tensor": (
        lambda **k: nvmeio.aio_handle().new_cpu_locked_tensor(3, **k),
        "example",
        "example_tensor",
    ),
    "aio_handle.pread": (
        lambda **k: nvmeio.aio_handle().pread(b"", "x", False, False, **k),
        "offset",
        "file_offset",
    ),
    "deepspeed.aio_handle": (
        lambda **k: nvmeio.deepspeed.aio_handle(**k),
        "queuedepth",
        "queue_depth",
    ),
    "create": (
        lambda **k: nvmeio.ArrayFile.create("x", 3, float, **k),
        "overwritee",
        "overwrite",
    ),
    "atomic_directory": (
        lambda **k: nvmeio.checkpoint.atomic_directory("x", **k),
        "replce",
        "replace",
    ),
    "load_sharded": (
        lambda **k: nvmeio.safetensors.load_sharded("x", **k),
        "name",
        "names",
    ),
    "save_sharded": (
        lambda **k: nvmeio.safetensors.save_sharded({}, "x", **k),
        "max_size",
        "max_shard_size",
    ),
    "read_profile": (lambda **k: nvmeio.profiles.read_profile(**k), "fil", "file"),
    "aio_read": (lambda **k: nvmeio.aio_read(b"", "x", **k), "valid", "validate"),
    "TokenDataset": (
        lambda **k: nvmeio.torch.TokenDataset("x", 3, **k),
        "dtpye",
        "dtype",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_misspelled_keyword_gets_a_suggestion(name):
    call, wrong, right = CALLS[name]
    with pytest.raises(TypeError, match=f"'{wrong}'; did you mean '{right}'") as refused:
        call(**{wrong: 1})
    assert name.rpartition(".")[2] in str(refused.value)


INCOMPLETE = {
    "read": (lambda handle: handle.read(), "buffer"),
    "write": (lambda handle: handle.write(b""), "file"),
    "submit_write": (lambda handle: handle.submit_write(file="x"), "buffer"),
    "fsync": (lambda handle: handle.fsync(data_only=True), "file"),
    "gather": (lambda handle: handle.gather(offsets=[0], sizes=1, out=b""), "file"),
    "submit_gather": (lambda handle: handle.submit_gather("x", [0], 1), "out"),
    "scatter": (lambda handle: handle.scatter("x", [0], 1), "buffer"),
    "submit_scatter": (lambda handle: handle.submit_scatter("x", sizes=1), "offsets"),
    "write_many": (lambda handle: handle.write_many(), "items"),
    "from_profile": (lambda handle: handle.from_profile(), "path"),
    "File": (lambda handle: nvmeio.File(mode="w"), "path"),
    "async_pread": (lambda handle: nvmeio.aio_handle().async_pread(), "buffer"),
    "new_cpu_locked_tensor": (
        lambda handle: nvmeio.aio_handle().new_cpu_locked_tensor(example_tensor=[]),
        "num_elem",
    ),
}


@pytest.mark.parametrize("name", INCOMPLETE)
def test_an_argument_that_is_missing_is_named(name):
    call, missing = INCOMPLETE[name]
    with pytest.raises(TypeError, match=f"the argument '{missing}' is missing"):
        call(nvmeio.default_handle())


def test_an_unrelated_keyword_is_refused_without_a_suggestion():
    with pytest.raises(TypeError) as refused:
        nvmeio.default_handle().read(b"", "x", colour=3)
    assert str(refused.value) == "read() got an unexpected keyword argument 'colour'"


def test_a_handle_takes_only_keywords():
    with pytest.raises(TypeError, match=r"keyword arguments alone, not 4096; block_size="):
        nvmeio.Handle(4096)


def test_a_missing_method_of_the_other_handle_is_pointed_out():
    with pytest.raises(AttributeError, match="'submit_read'; its handle has it"):
        nvmeio.aio_handle().submit_read  # noqa: B018
    with pytest.raises(AttributeError, match=r"'async_pread'; nvmeio\.aio_handle has it"):
        nvmeio.default_handle().async_pread  # noqa: B018
    for handle in (nvmeio.aio_handle(), nvmeio.default_handle()):
        with pytest.raises(AttributeError) as refused:
            handle.nothing  # noqa: B018
        assert str(refused.value).endswith("has no attribute 'nothing'")


@pytest.mark.parametrize("timeout_name", ["wait", "result", "exception"])
def test_methods_of_a_request_give_suggestions_too(tmp_path, timeout_name):
    request = nvmeio.default_handle().submit_write(np.zeros(9), tmp_path / "file")
    with pytest.raises(TypeError, match="'timeout_s'; did you mean 'timeout'"):
        getattr(request, timeout_name)(timeout_s=1)
    with pytest.raises(TypeError, match="timeout is '1'; it must be seconds, or None"):
        getattr(request, timeout_name)("1")
    request.wait()


@pytest.mark.parametrize("kind", [nvmeio.Handle, nvmeio.Request, nvmeio.File])
def test_signatures_show_only_real_parameters(kind):
    for name, member in inspect.getmembers(kind, callable):
        if not name.startswith("_"):
            assert "unknown" not in inspect.signature(member).parameters
    assert "unknown" not in inspect.signature(kind).parameters


# One name for each kind of argument, except in DeepSpeed's interface.
OTHER_WORDS = {"file_offset", "filename", "intra_op_parallelism", "pinned", "timeout_s"}
OF_DEEPSPEED = {"aio_handle", "aio_read", "aio_write", "deepspeed_memcpy"}


def public_callables():
    """Yield public callables by name, with their parameters."""
    for module in (nvmeio, nvmeio.torch):
        for name in {*module.__all__} - OF_DEEPSPEED:
            member = getattr(module, name)
            if inspect.isclass(member) and not issubclass(member, BaseException):
                for method, function in inspect.getmembers(member, callable):
                    owner = next(each for each in member.__mro__ if method in vars(each))
                    ours = owner.__module__.partition(".")[0] == "nvmeio"
                    if ours and not method.startswith("_"):
                        parameters = inspect.signature(function).parameters
                        yield f"{name}.{method}", [*parameters.values()]
            if not (inspect.isclass(member) and issubclass(member, BaseException)):
                yield name, [*inspect.signature(member).parameters.values()]


def test_arguments_have_one_order_and_one_name_each():
    seen = set()
    for name, parameters in public_callables():
        seen.add(name)
        assert not OTHER_WORDS.intersection(each.name for each in parameters), name
        positional = [
            each.name
            for each in parameters
            if each.kind is each.POSITIONAL_OR_KEYWORD and each.name != "self"
        ]
        if name.startswith("Handle.") and name.endswith(("gather", "scatter")):
            last = "buffer" if "scatter" in name else "out"
            assert positional == ["file", "offsets", "sizes", last], name
            continue
        assert len(positional) <= (4 if name == "read_file" else 3), name
        places = [each for each in positional if each in ("buffer", "file", "offset")]
        assert places == [each for each in ("buffer", "file", "offset") if each in places]
        if "buffer" in places:
            assert positional[0] == "buffer", name
    assert {"Handle.submit_read", "Handle.scatter", "Request.wait", "read_into"} <= seen
