"""A tensor on a device is staged in pieces; here the device is the CPU."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

# Imported after the check, because the module needs torch.
from nvmeio.torch._staging import DeviceStaging  # noqa: E402

SHAPES = {
    "contiguous": lambda: torch.arange(60, dtype=torch.int16),
    "transposed": lambda: torch.arange(60, dtype=torch.int16).reshape(6, 10).t(),
    "0-d": lambda: torch.tensor(3, dtype=torch.int16),
    "empty": lambda: torch.zeros(0, 3, dtype=torch.int16),
    "empty and transposed": lambda: torch.zeros(0, 3, dtype=torch.int16).t(),
    "leaf": lambda: torch.rand(60, requires_grad=True),
    "strided inference": torch.inference_mode()(lambda: torch.rand(6, 10).t()),
}


def content_of(tensor):
    return tensor.detach().contiguous().numpy().tobytes()


def write(staging):
    """Fetch the pieces in order, as a write request does."""
    return b"".join(
        staging.fetch(index).numpy().tobytes() for index in range(len(staging.pieces))
    )


def read(staging, content):
    """Read ahead as far as the slots allow and deliver in order, as a read request does."""

    def arrive(index):
        offset, nbytes = staging.pieces[index]
        piece = bytearray(content[offset : offset + nbytes])
        staging.host(index).copy_(torch.frombuffer(piece, dtype=torch.uint8))

    count = len(staging.pieces)
    for index in range(min(staging.slots, count)):
        arrive(index)
    for index in range(count):
        staging.deliver(index)
        if index + staging.slots < count:
            arrive(index + staging.slots)
    staging.finish()


@pytest.mark.parametrize("piece_bytes", [1, 7, 60, 120, 121, 1 << 20])
@pytest.mark.parametrize("make", SHAPES.values(), ids=SHAPES)
def test_fetched_pieces_are_the_bytes_in_c_order(make, piece_bytes):
    tensor = make()
    staging = DeviceStaging(tensor, False, piece_bytes=piece_bytes, slots=2)
    assert write(staging) == content_of(tensor)


@pytest.mark.parametrize("piece_bytes", [1, 7, 60, 120, 121, 1 << 20])
@pytest.mark.parametrize("make", SHAPES.values(), ids=SHAPES)
def test_delivered_pieces_fill_the_tensor_itself(make, piece_bytes):
    content = content_of(make())
    with torch.inference_mode(make().is_inference()):
        target = torch.zeros_like(make())
    read(DeviceStaging(target, True, piece_bytes=piece_bytes, slots=3), content)
    assert content_of(target) == content


def test_pieces_cover_the_tensor_and_share_few_buffers():
    staging = DeviceStaging(torch.zeros(1000), False, piece_bytes=300, slots=4)
    assert sum(nbytes for _, nbytes in staging.pieces) == 4000
    assert [offset for offset, _ in staging.pieces] == list(range(0, 4000, 300))
    addresses = [staging.host(index).data_ptr() for index in range(len(staging.pieces))]
    assert len(set(addresses)) == 4
    assert addresses[4:8] == addresses[:4]


@pytest.mark.parametrize("make", [SHAPES["contiguous"], SHAPES["transposed"]])
def test_a_read_counts_as_a_change(make):
    target = make()
    content, before = content_of(target), target._version
    read(DeviceStaging(target, True, piece_bytes=50), content)
    assert target._version > before


def test_lazy_conjugation_is_resolved_by_a_write():
    tensor = torch.complex(torch.rand(30), torch.rand(30)).conj()
    staging = DeviceStaging(tensor, False, piece_bytes=50)
    assert write(staging) == content_of(tensor.resolve_conj())


def test_the_memory_at_submission_is_filled():
    target = torch.zeros(10)
    memory = target.detach()
    staging = DeviceStaging(target, True, piece_bytes=16)
    target.data = torch.full((10,), -1.0)
    read(staging, content_of(torch.ones(10)))
    assert memory.eq(1).all()
    assert target.eq(-1).all()
