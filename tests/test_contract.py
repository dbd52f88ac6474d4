"""The interface that nvmeio shares with DeepSpeed's async_io op."""

import inspect

import numpy as np
import pytest

import nvmeio
from helpers import BLOCK, pattern

CONSTRUCTOR = {
    "block_size": 1 << 20,
    "queue_depth": 128,
    "single_submit": False,
    "overlap_events": False,
    "intra_op_parallelism": 1,
}

# "validate" has no default in the contract; nvmeio accepts more calls than the contract.
REQUIRED = inspect.Parameter.empty
METHODS = {
    "read": {"buffer": REQUIRED, "filename": REQUIRED, "validate": False, "file_offset": 0},
    "write": {
        "buffer": REQUIRED,
        "filename": REQUIRED,
        "validate": False,
        "file_offset": 0,
    },
    "sync_pread": {"buffer": REQUIRED, "filename": REQUIRED, "file_offset": 0},
    "sync_pwrite": {"buffer": REQUIRED, "filename": REQUIRED, "file_offset": 0},
    "async_pread": {"buffer": REQUIRED, "filename": REQUIRED, "file_offset": 0},
    "wait": {},
    "free_cpu_locked_tensor": {"tensor": REQUIRED},
    "is_pinned": {"buffer": REQUIRED},
}

FUNCTION = (
    "buffer",
    "filename",
    "block_size",
    "queue_depth",
    "single_submit",
    "overlap_events",
    "validate",
)


@pytest.fixture(params=[nvmeio.aio_handle, nvmeio.deepspeed.aio_handle], ids=["own", "op"])
def handle_class(request):
    """The handle that raises, and the one that returns statuses."""
    return request.param


@pytest.mark.parametrize("name", METHODS)
def test_arguments_have_the_names_order_and_defaults_of_the_contract(handle_class, name):
    parameters = inspect.signature(getattr(handle_class, name)).parameters
    positional = {
        parameter.name: parameter.default
        for parameter in parameters.values()
        if parameter.name != "self"
    }
    assert list(positional.items()) == list(METHODS[name].items())


@pytest.mark.parametrize("module", [nvmeio, nvmeio.deepspeed], ids=["own", "op"])
@pytest.mark.parametrize("name", ["aio_read", "aio_write"])
def test_the_functions_take_seven_arguments_without_defaults(module, name):
    parameters = inspect.signature(getattr(module, name)).parameters.values()
    assert tuple(parameter.name for parameter in parameters) == FUNCTION
    assert all(parameter.default is REQUIRED for parameter in parameters)


def test_the_constructor_names_the_contracts_arguments_first(handle_class):
    parameters = inspect.signature(handle_class).parameters.values()
    positional = [
        parameter.name
        for parameter in parameters
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY
    ]
    assert positional == list(CONSTRUCTOR)


def test_the_constructor_has_the_defaults_of_the_contract(open_handle):
    handle = open_handle()
    assert {name: getattr(handle, f"get_{name}")() for name in CONSTRUCTOR} == CONSTRUCTOR
    assert handle.get_alignment() == 512


def test_the_constructor_takes_the_contracts_arguments_by_position(handle_class):
    options = [4096, 7, True, True, 3]
    with handle_class(*options) as handle:
        assert [getattr(handle, f"get_{name}")() for name in CONSTRUCTOR] == options
        assert handle.get_alignment() == 3 * 512


def test_the_constructor_takes_the_contracts_arguments_by_keyword(open_handle):
    handle = open_handle(
        intra_op_parallelism=2,
        overlap_events=True,
        single_submit=True,
        queue_depth=9,
        block_size=12345,
    )
    assert [getattr(handle, f"get_{name}")() for name in CONSTRUCTOR] == [
        12345,
        9,
        True,
        True,
        2,
    ]


def test_arguments_beyond_the_contract_are_keyword_only(handle_class, engine):
    with pytest.raises(TypeError):
        handle_class(4096, 8, False, False, 1, engine)


# The result of each form of a call, and whether wait() counts it.
WRITES = {
    "write": (lambda h, *of: h.write(*of, False), 0, 0),
    "write, all by position": (lambda h, *of: h.write(*of, True, 0), 0, 0),
    "write, all by keyword": (
        lambda h, buffer, filename: h.write(
            buffer=buffer, filename=filename, validate=True, file_offset=0
        ),
        0,
        0,
    ),
    "sync_pwrite": (lambda h, *of: h.sync_pwrite(*of), 1, 0),
    "sync_pwrite, file_offset": (lambda h, *of: h.sync_pwrite(*of, file_offset=0), 1, 0),
    "pwrite": (lambda h, *of: h.pwrite(*of, False, False), 1, 0),
    "pwrite, offset": (lambda h, *of: h.pwrite(*of, True, False, 0), 1, 0),
    "pwrite, async": (lambda h, *of: h.pwrite(*of, False, True), 0, 1),
    "pwrite, async by keyword": (
        lambda h, buffer, filename: h.pwrite(
            **{
                "file_offset": 0,
                "async": True,
                "validate": True,
                "filename": filename,
                "buffer": buffer,
            }
        ),
        0,
        1,
    ),
    "async_pwrite": (lambda h, *of: h.async_pwrite(*of, 0), 0, 1),
    "async_pwrite, by keyword": (
        lambda h, buffer, filename: h.async_pwrite(
            buffer=buffer, filename=filename, file_offset=0
        ),
        0,
        1,
    ),
}

READS = {
    "read": (lambda h, *of: h.read(*of, False), 0, 0),
    "read, all by position": (lambda h, *of: h.read(*of, True, 0), 0, 0),
    "read, all by keyword": (
        lambda h, buffer, filename: h.read(
            buffer=buffer, filename=filename, validate=True, file_offset=0
        ),
        0,
        0,
    ),
    "sync_pread": (lambda h, *of: h.sync_pread(*of), 1, 0),
    "sync_pread, file_offset": (lambda h, *of: h.sync_pread(*of, file_offset=0), 1, 0),
    "pread": (lambda h, *of: h.pread(*of, False, False), 1, 0),
    "pread, offset": (lambda h, *of: h.pread(*of, True, False, 0), 1, 0),
    "pread, async": (lambda h, *of: h.pread(*of, True, True), 0, 1),
    "pread, async by keyword": (
        lambda h, buffer, filename: h.pread(buffer, filename, False, **{"async": True}),
        0,
        1,
    ),
    "async_pread": (lambda h, *of: h.async_pread(*of, 0), 0, 1),
    "async_pread, by keyword": (
        lambda h, buffer, filename: h.async_pread(
            buffer=buffer, filename=filename, file_offset=0
        ),
        0,
        1,
    ),
}


@pytest.mark.parametrize(("write", "status", "waited"), WRITES.values(), ids=WRITES)
def test_every_form_of_a_write_works(handle, path, write, status, waited):
    expected = pattern(2 * BLOCK + 5)
    returned = write(handle, expected, str(path))
    assert (returned, handle.wait()) == (status, waited)
    assert path.read_bytes() == expected
    assert handle.stats()["requests"] == 1


@pytest.mark.parametrize(("read", "status", "waited"), READS.values(), ids=READS)
def test_every_form_of_a_read_works(handle, path, read, status, waited):
    expected = pattern(2 * BLOCK + 5)
    path.write_bytes(expected)
    target = np.zeros(len(expected), np.uint8)
    returned = read(handle, target, str(path))
    assert (returned, handle.wait()) == (status, waited)
    assert target.tobytes() == expected
    assert handle.stats()["requests"] == 1


WRITES_TO_DESCRIPTORS = {
    "position": lambda h, buffer, fd: h.async_pwrite(buffer, fd, 3),
    "keyword": lambda h, buffer, fd: h.async_pwrite(buffer=buffer, fd=fd, file_offset=3),
    "of numpy": lambda h, buffer, fd: h.async_pwrite(
        buffer, fd=np.int64(fd), file_offset=3
    ),
}


@pytest.mark.parametrize("write", WRITES_TO_DESCRIPTORS.values(), ids=WRITES_TO_DESCRIPTORS)
def test_async_pwrite_takes_a_descriptor(handle, path, write):
    with open(path, "wb") as file:
        assert write(handle, b"456", file.fileno()) == 0
        assert handle.wait() == 1
    assert path.read_bytes() == bytes(3) + b"456"


@pytest.mark.parametrize("file", [{}, {"filename": "a", "fd": 1}])
def test_async_pwrite_takes_one_file(handle, file):
    with pytest.raises(TypeError, match="either filename or fd"):
        handle.async_pwrite(b"123", **file)


@pytest.mark.parametrize("number", [True, np.False_], ids=repr)
def test_a_boolean_is_no_descriptor(handle, number):
    with pytest.raises(TypeError, match=r"fd is .*; it must be an integer"):
        handle.async_pwrite(b"123", fd=number)
    assert handle.wait() == 0


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((b"",), {}, "lacks the argument 'filename'"),
        ((b"", "a", False), {}, "lacks the argument 'async'"),
        ((b"", "a", False, False, 0, 0), {}, "takes at most 5 arguments, not 6"),
        ((b"", "a", False, False), {"buffer": b""}, "got 'buffer' twice"),
        (
            (b"", "a", False, False),
            {"offset": 3},
            "got an unexpected keyword argument 'offset'",
        ),
    ],
)
@pytest.mark.parametrize("name", ["pread", "pwrite"])
def test_pread_and_pwrite_check_their_arguments_as_python_does(
    handle, name, args, kwargs, words
):
    with pytest.raises(TypeError, match=rf"{name}\(\) {words}"):
        getattr(handle, name)(*args, **kwargs)


@pytest.mark.parametrize("keyword", ["example_tensor", "example_tenosr"])
def test_the_example_of_a_locked_tensor_has_two_spellings(handle, keyword):
    example = np.zeros(1, np.float32)
    by_position = handle.new_cpu_locked_tensor(5, example)
    by_keyword = handle.new_cpu_locked_tensor(num_elem=5, **{keyword: example})
    for tensor in (by_position, by_keyword):
        assert (tensor.dtype, tensor.shape) == (np.dtype(np.float32), (5,))
        assert handle.is_pinned(buffer=tensor[1:])
        assert handle.free_cpu_locked_tensor(tensor=tensor) is True
        assert handle.free_cpu_locked_tensor(tensor) is False


def test_a_locked_tensor_needs_an_example(handle):
    with pytest.raises(TypeError):
        handle.new_cpu_locked_tensor(5)


def test_memory_that_torch_pinned_counts_as_pinned(handle):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    assert handle.is_pinned(torch.zeros(5).pin_memory())
    assert not handle.is_pinned(torch.zeros(5))
