"""Training with saved tensors on disk: identical to the bit, or an error."""

import contextlib
import gc
import os
import signal
import sys
import threading
import warnings

import pytest

from children import run_child, run_with_faults, skip_sanitized
from helpers import interrupted_after_each_call
from workloads.common import thread_count

torch = pytest.importorskip("torch", reason="torch is not installed")

# Imported after the check, because the module needs torch.
from torch.autograd import forward_ad  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import nvmeio  # noqa: E402
from nvmeio.torch import _offload, save_on_disk  # noqa: E402
from ranks import together  # noqa: E402
from workloads.activations import (  # noqa: E402
    SMALL,
    bits,
    bytes_on_disk,
    mlp,
    same_bits,
    train_together,
    transformer,
)

# In elements of four bytes.
SIZE = 40_000
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread, so that sums have one order."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@pytest.fixture
def saving(tmp_path):
    """Make contexts that put nearly everything on disk; check that nothing is left."""
    gc.collect()
    nvmeio.default_handle().close()
    before = thread_count(), len(os.listdir("/proc/self/fd"))

    def saving(**options):
        return save_on_disk(tmp_path, **{"min_bytes": SMALL, "memory": 0, **options})

    yield saving
    gc.collect()
    nvmeio.default_handle().close()
    assert list(_offload.slots._live) == []
    assert os.listdir(tmp_path) == []
    # What an earlier test has left may have gone meanwhile.
    assert thread_count() <= before[0]
    assert len(os.listdir("/proc/self/fd")) <= before[1]


def both(saving, step):
    """Return the results of a step without and with the context."""
    torch.manual_seed(0)
    expected = step()
    torch.manual_seed(0)
    with saving():
        found = step()
    return found, expected


MODELS = {"mlp": mlp, "transformer": transformer}


@pytest.mark.parametrize("memory", ["0", "300KiB", "1GiB"])
@pytest.mark.parametrize("name", MODELS)
def test_steps_equal_those_without_the_context(saving, default_engine, name, memory):
    expected = MODELS[name](contextlib.nullcontext, steps=6)
    assert same_bits(MODELS[name](lambda: saving(memory=memory), steps=6), expected)


class Saves(torch.autograd.Function):
    """Saves tensors unchanged, and exposes what is unpacked in the backward pass."""

    @staticmethod
    def forward(ctx, x, *tensors):
        ctx.save_for_backward(*tensors)
        ctx.found = []
        Saves.last = ctx.found
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        Saves.last.extend(ctx.saved_tensors)
        return (grad, *[None] * len(ctx.saved_tensors))


def come_back(context, *tensors):
    """Return tensors as a graph unpacks them."""
    with context:
        y = Saves.apply(torch.ones(1, requires_grad=True), *tensors)
    y.backward()
    found, Saves.last = Saves.last, None
    return found


LAYOUTS = {
    "dense": lambda t: t,
    "transposed": lambda t: t.transpose(0, 1),
    "expanded": lambda t: t[:, None].expand(-1, 3, -1),
    "a row, many times": lambda t: t[1].expand(40, -1),
    "overlapping": lambda t: t.view(-1).unfold(0, 64, 8),
    "a chunk": lambda t: t.chunk(3, -1)[1],
    "every other one": lambda t: t[:, ::2],
    "a column": lambda t: t[:, 5:6],
    "a column of an expanded": lambda t: t[:, None, 5:6].expand(-1, 3, -1),
    "its end": lambda t: t[1:],
    "a few rows": lambda t: t[7:9],
    "at an odd place": lambda t: t.view(-1)[3:].view(-1)[: 40 * 95].view(40, 95),
}
DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.complex64, torch.complex128, torch.bool, torch.int8, torch.int64),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_comes_back_as_it_was(saving, layout):
    for dtype in DTYPES:
        numbers = torch.randint(0, 256, (40 * 96 * dtype.itemsize,), dtype=torch.uint8)
        if dtype == torch.bool:
            numbers %= 2
        tensor = LAYOUTS[layout](numbers.view(dtype).view(40, 96))
        with saving(min_bytes=1):
            y = Saves.apply(torch.ones(1, requires_grad=True), tensor)
            assert bytes_on_disk() > 0
        expected = bits(tensor), tensor.shape, tensor.stride(), tensor.dtype
        address = tensor.data_ptr() % 64
        del tensor
        y.backward()
        (found,) = Saves.last
        assert (bits(found), found.shape, found.stride(), found.dtype) == expected
        assert found.data_ptr() % 64 == address


@pytest.mark.parametrize("memory", [0, 1 << 30])
def test_lazy_conjugates_and_negatives_come_back_lazy(saving, memory):
    z = torch.randn(40, 40, dtype=torch.complex64)
    lazy = [z, z.conj(), z.imag, z.conj().imag, z.conj().T, torch._neg_view(z.real)]
    found = come_back(saving(memory=memory), *lazy)
    for one, other in zip(found, lazy, strict=True):
        assert (one.is_conj(), one.is_neg()) == (other.is_conj(), other.is_neg())
        assert bits(one) == bits(other)
    assert [t.is_conj() for t in found] == [False, True, False, False, True, False]
    assert [t.is_neg() for t in found] == [False, False, False, True, False, True]


def test_tensors_without_elements_stay_and_come_back(saving):
    with saving(min_bytes=0):
        found = come_back(contextlib.nullcontext(), torch.empty(3, 0), torch.empty(0))
        assert bytes_on_disk() == 0
    assert [t.shape for t in found] == [(3, 0), (0,)]


def test_tensors_of_other_types_stay_in_memory(saving):
    class Mine(torch.Tensor):
        pass

    mine = torch.randn(50, 50).as_subclass(Mine)
    sparse = torch.randn(50, 50).to_sparse()
    meta = torch.empty(50, 50, device="meta")
    parts = [torch.randn(30, 50), torch.randn(20, 50)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    with saving():
        found = come_back(contextlib.nullcontext(), mine, sparse, meta, nested)
        assert bytes_on_disk() == 0
    assert type(found[0]) is Mine
    assert torch.equal(torch.Tensor(found[0]), torch.Tensor(mine))
    assert torch.equal(found[1].to_dense(), sparse.to_dense())
    assert found[2].device.type == "meta"
    assert torch.equal(found[3].values(), nested.values())


def test_strided_nested_tensors_stay_in_memory(saving):
    """They have no shape, so torch passes them to no function of Python."""

    def step(change=False):
        leaf = torch.linspace(-1, 1, 4000, requires_grad=True)
        nested = torch.nested.as_nested_tensor([leaf[:1000] * 2, leaf[1000:] * 3])
        y = torch.relu(nested * nested)
        if change:
            with torch.no_grad():
                nested.mul_(2)
        torch.nested.to_padded_tensor(y, 0.0).sum().backward()
        return leaf.grad

    found, expected = both(saving, step)
    assert same_bits(found, expected)
    with (
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
        saving(),
    ):
        step(change=True)


def test_zero_tensors_of_forward_mode_stay_in_memory(saving):
    zeros = torch._efficientzerotensor((50, 50))
    with saving():
        (found,) = come_back(contextlib.nullcontext(), zeros)
        assert bytes_on_disk() == 0
    assert found._is_zerotensor()
    assert torch.equal(found, zeros)

    def step():
        x = torch.linspace(-1, 1, 4000, requires_grad=True)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones(4000))
            y = dual.abs().clamp(min=0.5).relu() * dual
            torch.nn.functional.gelu(y).sum().backward()
        return x.grad

    found, expected = both(saving, step)
    assert same_bits(found, expected)


def test_memory_of_saved_tensors_is_released(saving):
    with saving(memory="64KiB"):
        x = torch.randn(64, 256, requires_grad=True)
        y, storages = x * 2, []
        for _ in range(20):
            storages.append(StorageWeakRef(y.untyped_storage()))
            y = y.sin()
            # Of 64 KiB each: the one that may stay in memory, and the newest.
            assert sum(not storage.expired() for storage in storages) <= 2
    assert bytes_on_disk() >= 19 * 65536
    y.sum().backward()


def chain(x, *, count=8, storages=None):
    """Return the sum of a chain of operations, each of which saves a tensor."""
    y = x
    for _ in range(count):
        y = y.sin()
        if storages is not None:
            storages.append(StorageWeakRef(y.untyped_storage()))
    return y.sum()


@pytest.mark.parametrize("mebibytes", [2, 40])
def test_the_process_grows_by_memory_and_the_needs_of_a_step(tmp_path, mebibytes):
    skip_sanitized("keep memory that was freed")
    grown = run_child("grow_by_memory", folder=str(tmp_path), mebibytes=mebibytes).report
    # The 64 MiB of `memory`, some tensors of the step, twice the amount that is freed at a
    # time, and 32 MiB for everything else; without the context it is 768 MiB.
    assert grown <= 64 + 6 * mebibytes + 64 + 32


def test_writes_go_out_while_the_forward_pass_computes(faulty_slots):
    folder, faults = faulty_slots
    x = torch.randn(SIZE, requires_grad=True)
    faults.set(write={"held": True})
    with save_on_disk(folder, min_bytes=SMALL):
        y = x.sin().sin()
        # A write is in flight, and none can end before the forward pass does.
        faults.await_waiting()
        loss = chain(y)
        assert faults.waiting() > 0
    faults.set()
    assert same_bits(
        torch.autograd.grad(loss, x), torch.autograd.grad(chain(x, count=10), x)
    )


def test_reads_run_ahead_of_the_backward_pass_in_reverse_order(faulty_slots, monkeypatch):
    folder, faults = faulty_slots
    read, reads = _offload.slots.SlotFile._submit_read, []

    def submit(file, slot):
        reads.append(slot.serial)
        read(file, slot)

    class Held(torch.autograd.Function):
        """Computes only while a read-ahead is in flight."""

        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            faults.await_waiting()
            held.append(list(reads))
            faults.set()
            return grad

    held = []
    x = torch.randn(SIZE, requires_grad=True)
    monkeypatch.setattr(_offload.slots.SlotFile, "_submit_read", submit)
    with save_on_disk(folder, min_bytes=SMALL, memory=3 * x.nbytes):
        # x is not saved, so slots 0 to 6 belong to the others; 4 to 6 are in memory.
        y = x
        for index in range(8):
            y = y.sin() if index != 5 else Held.apply(y.sin())
        loss = y.sum()
    (file,) = _offload.slots._live
    file.drain()
    faults.set(read={"held": True})
    grads = torch.autograd.grad(loss, x)
    # When Held computes, two slots are in use or being read.
    assert held == [[3]]
    assert reads == [3, 2, 1, 0]
    assert same_bits(grads, torch.autograd.grad(chain(x), x))


@pytest.mark.parametrize("call", ["write", "read"])
def test_a_change_in_place_after_the_save_is_an_error(faulty_slots, call):
    folder, faults = faulty_slots
    x = torch.randn(SIZE, requires_grad=True)
    errors = []

    def backward():
        try:
            loss.backward()
        except RuntimeError as error:
            errors.append(str(error))

    if call == "write":
        faults.set(write={"held": True})
    memory = 1 << 30 if call == "write" else 0
    with save_on_disk(folder, min_bytes=SMALL, memory=memory):
        y = x.exp()
        loss = (y * 1).sum()
    if call == "read":
        faults.set(read={"held": True})
    thread = threading.Thread(target=backward)
    if call == "read":
        thread.start()
    faults.await_waiting()
    with torch.no_grad():
        y.add_(1)
    faults.set()
    if call == "write":
        thread.start()
    thread.join()
    (words,) = errors
    assert "is at version 1; expected version 0" in words


CHANGES = {
    "itself": lambda y: y.add_(1),
    "a view": lambda y: y[0].add_(1),
    "detached": lambda y: y.detach().add_(1),
    "a view of it detached": lambda y: y.detach().view(-1)[5:].mul_(2),
    "out=": lambda y: torch.add(y.detach(), 1, out=y.detach()),
    "counted by hand": lambda y: torch.autograd.graph.increment_version(y),
}


@pytest.mark.parametrize("size", [4, 4000])
@pytest.mark.parametrize("memory", [0, 1 << 30])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_in_place_raises_torchs_own_error(saving, memory, change, size):
    words = "modified by an inplace operation: .*is at version [12]; expected version 0"
    for context in (contextlib.nullcontext(), saving(memory=memory)):
        x = torch.randn(size, requires_grad=True)
        with context:
            y = x.exp()
            z = y * 1
            with torch.no_grad():
                CHANGES[change](y)
            with pytest.raises(RuntimeError, match=words):
                z.sum().backward()


@pytest.mark.parametrize("size", [4, 4000])
def test_a_weight_that_the_optimizer_changes_too_early_is_an_error(saving, size):
    for context in (contextlib.nullcontext(), saving()):
        model = torch.nn.Linear(size, 4)
        optimizer = torch.optim.SGD(model.parameters())
        x = torch.randn(10, size, requires_grad=True)
        with context:
            loss = model(x).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_changes_before_the_save_and_after_the_last_use_are_allowed(saving):
    def step():
        x = torch.randn(4000, requires_grad=True)
        y = (x * 2).add_(1)
        z = y.exp()
        grad = torch.autograd.grad(z.sum(), x)
        with torch.no_grad():
            z.zero_()
        return grad

    found, expected = both(saving, step)
    assert same_bits(found, expected)


def test_a_backward_that_changes_its_saved_tensor_fails_the_next_one(saving):
    class Changes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x * 1)
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            (saved,) = ctx.saved_tensors
            return grad * saved.mul_(2)

    for context in (contextlib.nullcontext(), saving(), saving(memory=1 << 30)):
        with context:
            y = Changes.apply(torch.randn(4000, requires_grad=True))
        y.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_equal_saves_are_written_once(saving):
    with saving():
        x = torch.randn(64, 1024, requires_grad=True) * 1
        # exp saves its result, each product saves its factor, and all are views.
        y = x.exp()
        for view in (y, y.view(-1), y.T, y.detach(), *y.chunk(3, -1), y[2:50]):
            view.mul(view.detach() if view.requires_grad else x.view(-1)[:1])
            once = Saves.apply(torch.ones(1, requires_grad=True), view)
        assert bytes_on_disk() == y.nbytes
        Saves.apply(torch.ones(1, requires_grad=True), once, y.clone())
        assert bytes_on_disk() == 2 * y.nbytes


def test_a_tensor_changed_between_saves_is_written_again(saving):
    def step():
        x = torch.randn(4000)
        first = Saves.apply(torch.ones(1, requires_grad=True), x.clone())
        y = torch.randn(4000, requires_grad=True) * 1
        a = (y * x).sum()
        x.add_(1)
        b = (y * x).sum()
        return torch.autograd.grad(b, y), first, a

    found, expected = both(saving, step)
    assert same_bits(found[0], expected[0])


def test_memory_with_its_own_version_counter_is_written_again(saving):
    x = torch.randn(4000)
    alias = x.data
    with saving():
        ones = torch.ones(1, requires_grad=True)
        first = Saves.apply(ones, x)
        before = bits(x)
        # It has the same version as x; only the counters differ.
        torch._C._autograd._unsafe_set_version_counter((alias,), (0,))
        x.numpy()[:] = 3
        second = Saves.apply(ones, alias)
    second.backward()
    assert bits(Saves.last.pop()) == bits(x) != before
    del first


def test_a_look_at_a_version_is_not_seen_by_other_threads(saving):
    """Another thread may look between any two lines of this one, and must see no change."""
    x = torch.randn(4000)
    seen = []

    def watch(frame, event, argument):
        if frame.f_code.co_filename.endswith("slots.py"):
            seen.append(x._version)
        return watch

    with saving():
        ones = torch.ones(1, requires_grad=True)
        graphs = [Saves.apply(ones, x)]
        before = sys.gettrace()
        sys.settrace(watch)
        try:
            graphs.append(Saves.apply(ones, x))
        finally:
            sys.settrace(before)
        # The slot was found, and so looked at.
        assert bytes_on_disk() == 16_000
    assert seen
    assert set(seen) == {0}


def test_a_folder_is_that_of_the_call_after_a_change_of_the_working_folder(
    saving, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    context = save_on_disk(".", min_bytes=SMALL, memory=0)
    (tmp_path.parent / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path.parent / "elsewhere")
    with context:
        assert come_back(contextlib.nullcontext(), torch.ones(4000))
    # The files have no names; the folder of their errors is that of the call.
    monkeypatch.chdir(tmp_path)
    relative = save_on_disk("missing")
    monkeypatch.chdir("..")
    with pytest.raises(FileNotFoundError) as caught, relative:
        pass
    assert caught.value.filename == str(tmp_path / "missing")


def test_a_graph_may_be_used_twice_and_is_then_released(saving):
    with saving():
        x = torch.randn(4000, requires_grad=True)
        z = x.exp().sin().sum()
    z.backward(retain_graph=True)
    first, x.grad = x.grad, None
    assert bytes_on_disk() > 0
    z.backward()
    assert torch.equal(first, x.grad)
    assert bytes_on_disk() == 0


class Holder(torch.nn.Module):
    """Has parameters and buffers of each kind, and uses those of another module."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(64, 256))
        self.frozen = torch.nn.Parameter(torch.randn(256, 64), requires_grad=False)
        self.register_buffer("scale", torch.randn(256))
        self.inner = torch.nn.Module()
        self.inner.register_buffer("table", torch.randn(512, 64), persistent=False)
        self.inner.weight = torch.nn.Parameter(torch.randn(64, 64))

    def forward(self, x):
        x = (x @ self.weight) * self.scale
        x = (
            (x @ self.frozen.detach().clone().copy_(self.frozen))
            if self.copies
            else x @ self.frozen
        )
        x = x @ self.inner.weight.T * self.inner.table[: len(x)]
        return x * self.inner.table.data[:1]

    copies = False


def test_parameters_buffers_and_their_views_stay_in_memory(saving):
    model = Holder()
    x = torch.randn(2, 64, requires_grad=True)
    for call in (model, lambda x: torch.func.functional_call(model, {}, x)):
        with saving(min_bytes=4096):
            loss = call(x).sum()
            assert bytes_on_disk() == 0
        loss.backward()
    # A copy counts as neither parameter nor buffer.
    model.copies = True
    with saving(min_bytes=4096):
        loss = model(x).sum()
        assert bytes_on_disk() == model.frozen.nbytes
    loss.backward()


def test_views_of_parameters_outside_of_modules_stay_in_memory(saving):
    weight = torch.nn.Parameter(torch.randn(64, 256))
    leaf = torch.randn(64, 64, requires_grad=True)
    with saving(min_bytes=4096):
        loss = (leaf @ weight).sum() + (leaf.T @ weight[:64]).sum()
        assert bytes_on_disk() == 0
    loss.backward()


def test_copies_of_weights_by_autocast_go_to_disk(saving):
    def step():
        model = torch.nn.Linear(256, 256, bias=False)
        x = torch.randn(4, 256, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).square().sum()
        disk.append(bytes_on_disk())
        loss.backward()
        return model.weight.grad, x.grad

    disk = []
    found, expected = both(lambda: saving(min_bytes=65536), step)
    assert disk == [0, 256 * 256 * 2]
    assert same_bits(found, expected)


@pytest.mark.parametrize("inside", [True, False])
def test_double_backward_works(saving, inside):
    def step(context):
        torch.manual_seed(0)
        x = torch.randn(4000, requires_grad=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(context)
            y = (x.sin() * x.exp()).sum()
            if not inside:
                stack.close()
            (grad,) = torch.autograd.grad(y, x, create_graph=True)
            (second,) = torch.autograd.grad(grad.square().sum(), x, create_graph=True)
            return grad, second, *torch.autograd.grad(second.sum(), x)

    assert same_bits(step(saving()), step(contextlib.nullcontext()))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_works(saving, inside, use_reentrant):
    def step(context):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.GELU())
        last = torch.nn.Linear(512, 4)
        x = torch.randn(32, 64, requires_grad=True)

        def block(x):
            with context() if inside else contextlib.nullcontext():
                return model(x)

        with contextlib.nullcontext() if inside else context():
            y = last(checkpoint(block, x * 2, use_reentrant=use_reentrant))
            if not inside:
                loss = y.sum()
        if inside:
            loss = y.sum()
        loss.backward()
        return [x.grad, *(p.grad for p in (*model.parameters(), *last.parameters()))]

    assert same_bits(step(saving), step(contextlib.nullcontext))


def test_selective_checkpointing_works(saving):
    from torch.utils.checkpoint import create_selective_checkpoint_contexts as selective

    ops = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]

    def step(context):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.GELU())
        x = torch.randn(32, 64, requires_grad=True)

        def block(x):
            with context():
                return model(x).sin()

        y = checkpoint(block, x * 2, use_reentrant=False, context_fn=lambda: selective(ops))
        y.sum().backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    assert same_bits(step(saving), step(contextlib.nullcontext))


def test_an_exception_in_the_forward_pass_leaves_nothing(saving):
    storages = []

    def step():
        chain(torch.randn(SIZE, requires_grad=True), storages=storages)
        raise ValueError("half-way")

    with pytest.raises(ValueError, match="half-way"), saving(memory=1 << 30):
        step()
    gc.collect()
    assert all(storage.expired() for storage in storages)


def test_an_exception_in_the_backward_pass_leaves_nothing(saving):
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("half-way")

    with saving(memory=6 * 4 * SIZE):
        loss = chain(Raises.apply(chain(torch.randn(SIZE, requires_grad=True)) * 1).sin())
    with pytest.raises(ValueError, match="half-way"):
        loss.backward()
    del loss


def test_a_dropped_graph_leaves_nothing(saving):
    storages = []
    with saving(memory=1 << 30):
        for _ in range(3):
            chain(torch.randn(SIZE, requires_grad=True), storages=storages)
        y = chain(torch.randn(SIZE, requires_grad=True), storages=storages)
        y.circle = [y]
        (file,) = _offload.slots._live
        file.drain()
        assert len(file._slots) == 8 - 1
        # The file keeps no blocks either; 4096 bytes are one page.
        taken = file._room._end - sum(room for _, room in file._room._gaps)
        assert taken == (8 - 1) * -(-4 * SIZE // 4096) * 4096
    del y, file
    gc.collect()
    assert all(storage.expired() for storage in storages)


@pytest.mark.parametrize("when", ["drop", "_end"])
def test_ctrl_c_while_a_graph_is_dropped_is_raised(saving, monkeypatch, when):
    """Python only prints what a signal handler raises in a destructor."""
    owner = _offload.slots.SlotFile if when == "drop" else _offload.slots
    before, done = getattr(owner, when), []

    def interrupted(*args):
        before(*args)
        if not done:
            done.append(when)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(owner, when, interrupted)
    with saving(memory=1 << 30):
        loss = chain(torch.randn(SIZE, requires_grad=True))
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        del loss
        while True:
            assert done
    assert done == [when]


def test_ctrl_c_after_any_call_leaves_nothing_locked_or_changed(saving):
    def step():
        x = torch.ones(SIZE, requires_grad=True)
        with saving():
            loss = chain(x, count=2)
        loss.backward()
        return x.grad

    expected, runs = step(), 0
    for _ in interrupted_after_each_call(step, ("nvmeio", "contextlib")):
        runs += 1
        assert torch.is_grad_enabled()
        assert torch._C._is_torch_function_enabled()
        assert not torch.is_inference_mode_enabled()
        if torch._C._autograd._top_saved_tensors_default_hooks(True):
            # torch's saved_tensors_hooks() was interrupted.
            torch._C._autograd._pop_saved_tensors_default_hooks()
        assert torch.equal(step(), expected)
    assert runs > 100


def test_a_context_can_be_entered_again(saving):
    context = saving()

    def step(*contexts):
        torch.manual_seed(0)
        x = torch.randn(SIZE, requires_grad=True)
        with contextlib.ExitStack() as stack:
            for each in contexts:
                stack.enter_context(each)
            loss = chain(x)
        on_disk = bytes_on_disk()
        loss.backward()
        return x.grad, on_disk

    expected, _ = step()
    for contexts in ([context], [context], [context, context]):
        found, on_disk = step(*contexts)
        assert torch.equal(found, expected)
        assert on_disk > SIZE


def test_of_nested_contexts_the_inner_one_is_used(saving):
    def step(outer, inner, *, count=False):
        torch.manual_seed(0)
        x = torch.randn(4000, requires_grad=True)
        with outer():
            y = x.exp()
            with inner():
                z = y.exp().exp()
            w = z.cos()
            if count:
                files = sorted(_offload.slots._live, key=lambda file: file.memory)
                # The first exp saves y; each other exp saves its result; cos saves the last
                # one too.
                assert [len(file._slots) for file in files] == [2, 2]
                del files
        return torch.autograd.grad(w.sum(), x)

    def inner():
        return saving(memory=1 << 30)

    plain = step(contextlib.nullcontext, contextlib.nullcontext)
    assert same_bits(step(saving, inner, count=True), plain)
    assert same_bits(step(saving, torch.autograd.graph.save_on_cpu), plain)
    assert same_bits(step(torch.autograd.graph.save_on_cpu, saving), plain)


def test_contexts_of_threads_are_independent(saving):
    wrong = []

    def work(seed):
        numbers = torch.Generator().manual_seed(seed)
        x = torch.randn(40_000, generator=numbers).requires_grad_()
        grads = []
        for context in (saving(memory="200KB"), contextlib.nullcontext()):
            with context:
                y = x
                for _ in range(10):
                    y = y.sin().exp()
            grads += torch.autograd.grad(y.sum(), x)
        if not torch.equal(*grads):
            wrong.append(seed)

    threads = [threading.Thread(target=work, args=[seed]) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_backward_in_other_threads_works(saving):
    x = torch.randn(40_000, requires_grad=True)

    def forward():
        y = x
        for _ in range(10):
            y = y.sin().exp()
        return y.sum()

    expected = torch.autograd.grad(forward(), x)
    found = []
    with saving(memory="300KB"):
        losses = [forward() for _ in range(3)]
    threads = [
        threading.Thread(
            target=lambda loss=loss: found.append(torch.autograd.grad(loss, x))
        )
        for loss in losses
    ]
    del losses
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    del threads
    assert len(found) == 3
    assert all(same_bits(grads, expected) for grads in found)


def test_the_users_own_hooks_inside_are_called(saving):
    packed = []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.detach()

    def step():
        x = torch.randn(4000, requires_grad=True)
        y = x.exp()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = y.sin()
        return torch.autograd.grad(y.cos().sum(), x)

    found, expected = both(saving, step)
    assert same_bits(found, expected)
    assert len(packed) == 2


def test_without_gradients_nothing_is_saved(saving):
    x = torch.randn(4000, requires_grad=True)
    with saving():
        with torch.no_grad():
            x.exp().sin()
        with torch.inference_mode():
            x.exp().sin()
        assert bytes_on_disk() == 0
        y = x.exp()
    y.sum().backward()
    assert torch.equal(x.grad, x.exp())


@pytest.mark.parametrize("name", ["grad", "vjp", "jacrev", "hessian"])
def test_transforms_of_torch_func_are_refused(saving, name):
    x = torch.randn(4000)
    transform = getattr(torch.func, name)
    calls = {"vjp": lambda: transform(torch.sin, x)}
    call = calls.get(name, lambda: transform(lambda x: x.sin().sum())(x))
    with (
        pytest.raises(RuntimeError, match=r"inside nvmeio.torch.save_on_disk"),
        saving(),
    ):
        call()
    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        torch.func.grad(lambda x: opened(saving, x))(x)


def opened(saving, x):
    with saving():
        return x.sin().sum()


def test_vmap_and_forward_mode_work(saving):
    def step():
        x = torch.randn(50, 80, requires_grad=True)
        y = torch.func.vmap(lambda row: row.sin() * row.exp())(x)
        _, tangent = torch.func.jvp(torch.sin, (y,), (torch.ones_like(y),))
        jacobian = torch.autograd.functional.jacobian(
            lambda v: v.exp() * v, x[0].detach(), vectorize=True
        )
        return *torch.autograd.grad((y * tangent).sum(), x), jacobian

    found, expected = both(lambda: saving(min_bytes=1), step)
    assert same_bits(found, expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_functions_inside_work(tmp_path, backend):
    # The compiler has its own threads and files.
    def saving():
        return save_on_disk(tmp_path, min_bytes=SMALL, memory=0)

    def step():
        torch.manual_seed(0)
        block = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.GELU())
        last = torch.nn.Linear(512, 4)
        compiled = torch.compile(block, backend=backend)
        total = []
        for _ in range(3):
            x = torch.randn(32, 64, requires_grad=True)
            loss = last(compiled(x * 2)).sum()
            disk.append(bytes_on_disk())
            loss.backward()
            total += [x.grad, *(p.grad.clone() for p in block.parameters())]
        return total

    disk = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
        found, expected = both(saving, step)
        torch._dynamo.reset()
    assert same_bits(found, expected)
    assert min(disk[3:]) > 0 == max(disk[:3])
    gc.collect()
    assert bytes_on_disk() == 0


def test_batch_norm_trains_as_without_the_context(saving):
    def step():
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(inplace=True)
        )
        grads = []
        for _ in range(3):
            model(torch.randn(4, 3, 20, 20)).square().mean().backward()
            grads += [p.grad.clone() for p in model.parameters()]
        return [*grads, *(b.float() for b in model.buffers())]

    found, expected = both(saving, step)
    assert same_bits(found, expected)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"memory": -1}, ValueError, "memory is -1; it must be 0 bytes"),
        ({"memory": "much"}, ValueError, "memory is 'much'"),
        ({"memory": "1.3B"}, ValueError, "memory is '1.3B'"),
        ({"memory": 1 << 63}, ValueError, "memory is 9223372036854775808"),
        ({"min_bytes": 1.5}, TypeError, "min_bytes is 1.5; it must be a number"),
        ({"min_bytes": True}, TypeError, "min_bytes is True"),
        ({"min_bytes": None}, TypeError, "min_bytes is None"),
        ({"folder": 3.5}, TypeError, "path is 3.5"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, options, error, words):
    with pytest.raises(error, match=words):
        save_on_disk(**{"folder": tmp_path, **options})


@pytest.mark.parametrize("kind", [str, os.fsencode, lambda path: path])
def test_folders_may_be_any_kind_of_path(saving, tmp_path, kind):
    with save_on_disk(kind(tmp_path), min_bytes="1 KiB", memory=0):
        y = torch.randn(4000, requires_grad=True).exp()
        assert bytes_on_disk() > 0
    del y


def test_a_missing_folder_is_named(tmp_path):
    with (
        pytest.raises(FileNotFoundError, match="missing"),
        save_on_disk(tmp_path / "missing"),
    ):
        pass


def test_ddp_on_gloo_works(tmp_path):
    for report in together(tmp_path, train_together, 2, folder=str(tmp_path)):
        assert report == {"same": True, "on disk": True}


def test_forked_workers_of_a_data_loader_do_not_disturb(tmp_path):
    report = run_child("train_beside_workers", folder=str(tmp_path)).report
    assert report == {"same": True, "on disk": True, "left": 0}


def test_a_forked_child_keeps_its_saved_tensors_in_memory(tmp_path):
    report = run_child("train_in_a_child", folder=str(tmp_path)).report
    assert report["child"] == ["same", "before a fork"]
    assert report["parent"]


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_ctrl_c_leaves_nothing_in_flight(faulty, when):
    (faulty / "control").touch()
    report = run_child("ctrl_c_while_training", folder=str(faulty), when=when).report
    assert report == {"interrupted": True, "held": True, "files": 0, "same": True}


@pytest.mark.parametrize(
    ("fault", "name", "where"),
    [
        ("pwrite64:error=ENOSPC:when=3+", "ENOSPC", "forward"),
        ("pread64:error=EIO:when=2+", "EIO", "backward"),
    ],
)
def test_a_failing_drive_is_an_error_of_the_step(tmp_path, fault, name, where):
    report = run_with_faults(
        "train_with_faults", fault, folder=str(tmp_path), env={"NVMEIO_ENGINE": "sync"}
    ).report
    assert (report["outcome"], report["where"]) == (name, where)
    assert report["left"] == 0
    if where == "forward":
        assert report["filename"] == str(tmp_path)


def test_bfloat16_under_autocast_works(tmp_path):
    env = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
    report = run_child("train_in_bfloat16", folder=str(tmp_path), env=env).report
    assert report == {"same": True, "on disk": True}


@needs_cuda
def test_tensors_of_a_device_come_back_to_it(saving):
    def step():
        x = torch.randn(300, 300, device="cuda", requires_grad=True)
        y = x
        for _ in range(10):
            y = (y @ y.T.contiguous()).sin()
        disk.append(bytes_on_disk())
        return [grad.cpu() for grad in torch.autograd.grad(y.sum(), x)]

    disk = []
    found, expected = both(saving, step)
    assert same_bits(found, expected)
    assert disk[1] > 0


def test_a_resized_storage_is_written_again(saving):
    x = torch.zeros(4000)
    with saving():
        ones = torch.ones(1, requires_grad=True)
        first = Saves.apply(ones, x)
        # As FSDP does, without changing the version.
        with torch.autograd._unsafe_preserve_version_counter(x):
            x.untyped_storage().resize_(0)
            x.untyped_storage().resize_(80_000)
            x.set_(x.untyped_storage(), 0, (20_000,))
            x.fill_(3)
        second = Saves.apply(ones, x)
    second.backward()
    assert torch.equal(Saves.last.pop(), torch.full((20_000,), 3.0))
    del first


def test_a_child_that_leaves_the_context_by_an_exception_does_not_hang(tmp_path):
    report = run_child("leave_in_a_child", folder=str(tmp_path)).report
    assert report == {"child": 7, "parent": True}


@needs_cuda
def test_a_change_in_place_on_a_device_is_an_error(saving):
    with saving():
        y = torch.randn(SIZE, device="cuda", requires_grad=True).exp()
        loss = (y * 1).sum()
        with torch.no_grad():
            y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
