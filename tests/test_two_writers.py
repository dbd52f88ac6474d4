"""Two writers of one folder: one is held before each of its calls while the other writes.

A call is one that gives a file its name, or takes it away.  Where the first has locked a
file, the server of NFS has given its locks away meanwhile, as after a partition.
"""

import errno
import fcntl
import itertools
import os
import shutil

import pytest

pytest.importorskip("torch")
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from nvmeio._safetensors import replacing
from nvmeio.checkpoint import Checkpointer, CheckpointError, _draining, _places, drain
from nvmeio.safetensors import _sharded, load_sharded, save_sharded
from nvmeio.torch.dcp import (
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    _writing,
)

CALLS = ("replace", "rename", "unlink", "link")
FAILURES = (OSError, CheckpointError, CheckpointException)


def state_of(value):
    return {name: torch.full((100,), float(value)) for name in "abc"}


def value_of(state):
    """Return the only value in a state."""
    (value,) = {value for each in state.values() for value in each.unique().tolist()}
    return value


def forget_locks(folder):
    """Release all locks of this process below a folder, as a server does."""
    for number in os.listdir("/proc/self/fd"):
        try:
            where = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            continue
        if where.startswith(f"{folder}/"):
            fcntl.flock(int(number), fcntl.LOCK_UN)


def beside_each_call(monkeypatch, folder, before, first, second):
    """Yield what each of two writers has raised, for each call of the first one."""
    monkeypatch.setattr(_draining, "PAUSE_S", 0)
    # So that the other threads of a drain do not go on while one is held.
    monkeypatch.setattr(_draining, "FILES", 1)
    for number in itertools.count():
        shutil.rmtree(folder, ignore_errors=True)
        before()
        errors, left = [None, None], [number]

        def attempt(which, write, errors=errors):
            try:
                write()
            except FAILURES as error:
                errors[which] = error

        def held(call, left=left, attempt=attempt):
            def calls(*args, **options):
                # exists_now() asks for a link to a folder, which nobody makes.
                is_here = f"{folder}/" in str(args[-1])
                if left and is_here and not str(args[0]).endswith("/."):
                    left[0] -= 1
                    if left[0] < 0:
                        left.clear()
                        forget_locks(folder)
                        attempt(1, second)
                return call(*args, **options)

            return calls

        with monkeypatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, held(getattr(os, name)))
            attempt(0, first)
        if left:
            assert number
            return
        yield errors


def hugging_face(folder, value, collectives=True, **options):
    mapping = {name: number for number, name in enumerate(state_of(0), 1)}
    writer = HuggingFaceStorageWriter(str(folder), mapping, **options)
    state, alone = state_of(value), {"no_dist": True, "use_collectives": collectives}
    dcp.save(state, storage_writer=writer, **alone)


def parts(folder, value):
    hugging_face(folder, value, save_distributed=True)


def parts_of_one_rank(folder, value):
    hugging_face(folder, value, collectives=False, save_distributed=True)


def shards(folder, value):
    save_sharded(state_of(value), folder, 400)


def in_two(folder, value):
    save_sharded(state_of(value), folder, 800)


def file_system(folder, value):
    dcp.save(state_of(value), storage_writer=FileSystemWriter(folder), no_dist=True)


def one_rank(folder, value):
    writer = FileSystemWriter(folder)
    dcp.save(state_of(value), storage_writer=writer, no_dist=True, use_collectives=False)


def step(folder, value):
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(5, state_of(value))


def drained(save, **options):
    """Return a writer that drains what `save` has saved."""

    def write(folder, value):
        source = f"{folder}-{value}"
        if not os.path.exists(source):
            save(source, value)
        drain(source, folder, retries=0, **options).result()

    write.__name__ = f"drained_{save.__name__}"
    return write


# Temporary names have only a part of the first; the second has no room for the rest.
MARK, LONG = 100 * "m", 230 * "m"


def plain(folder, value):
    os.mkdir(folder)
    for name in ("a", "b", "c", MARK, LONG):
        with open(os.path.join(folder, name), "w") as file:
            file.write(f"{value}")


def read_plain(folder):
    (value,) = {(folder / name).read_text() for name in ("a", "b", "c", MARK, LONG)}
    return int(value)


def read_with(reader):
    def read(folder):
        state = {name: torch.zeros(100) for name in "abc"}
        dcp.load(state, storage_reader=reader(str(folder)), no_dist=True)
        return value_of(state)

    return read


def read_sharded(folder):
    return value_of(load_sharded(folder))


def read_step(folder):
    return value_of(Checkpointer(folder, verify="checksum").restore())


MODELS = [hugging_face, shards, in_two]
OF_MODELS = [read_sharded, read_with(HuggingFaceStorageReader)]
PARTS = [parts, parts_of_one_rank, drained(parts)]
OF_PARTS = OF_MODELS[1:]
OF_CHECKPOINTS = [read_with(FileSystemReader)]
PAIRS = [
    *((first, second, OF_MODELS) for first in MODELS for second in MODELS),
    *((drained(shards), second, OF_MODELS) for second in (hugging_face, shards)),
    *((first, second, OF_PARTS) for first in PARTS for second in PARTS),
    (file_system, file_system, OF_CHECKPOINTS),
    (one_rank, one_rank, OF_CHECKPOINTS),
    (file_system, drained(file_system), OF_CHECKPOINTS),
    (one_rank, drained(one_rank), OF_CHECKPOINTS),
    (drained(file_system), drained(file_system), OF_CHECKPOINTS),
    (drained(file_system), file_system, OF_CHECKPOINTS),
    (step, step, [read_step]),
    (step, drained(step), [read_step]),
    (drained(step), step, [read_step]),
    (drained(step), drained(step), [read_step]),
    *(
        (drained(plain, last=[mark]), drained(plain, last=[mark]), [read_plain])
        for mark in (MARK, LONG)
    ),
]


@pytest.mark.parametrize(("first", "second", "readers"), PAIRS)
@pytest.mark.parametrize("is_old", [True, False])
def test_neither_mixes(tmp_path, monkeypatch, first, second, readers, is_old):
    """The old copy is that of the second writer, if it drains, whose files are there."""
    folder = tmp_path / "target"
    # What is drained is saved first.
    for value, write in enumerate((first, second), 1):
        write(folder, value)

    def before():
        if is_old:
            second(folder, 2)
        else:
            folder.mkdir()

    pair = (lambda: first(folder, 1)), (lambda: second(folder, 2))
    for errors in beside_each_call(monkeypatch, folder, before, *pair):
        saved = {value for value, error in zip((1, 2), errors, strict=True) if not error}
        assert saved
        assert not any(isinstance(error, FileNotFoundError) for error in errors)
        values = {read(folder) for read in readers}
        assert values <= saved
        assert len(values) == 1


@pytest.mark.parametrize(
    ("save", "readers"),
    [(shards, OF_MODELS), (file_system, OF_CHECKPOINTS), (step, [read_step])],
)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EPERM])
def test_a_drain_replaces_nothing_if_others_were_not_kept_away(
    tmp_path, monkeypatch, save, readers, code
):
    """The drive was full when it began, and is not any more; what is there may be all."""
    folder, write = tmp_path / "target", drained(save)
    write(folder, 2)

    def files():
        found = {path.name: path.stat() for path in folder.iterdir()}
        return {name: (each.st_ino, each.st_mtime_ns) for name, each in found.items()}

    before = files()

    def full(target, mode):
        raise OSError(code, os.strerror(code), target)

    monkeypatch.setattr(_places, "Claim", full)
    write(folder, 2)
    with pytest.raises(OSError, match="others were not kept away") as caught:
        write(folder, 1)
    assert caught.value.errno == code
    assert files() == before
    assert {read(folder) for read in readers} == {2}


def test_of_drains_of_plain_files_one_fails_if_they_mix(tmp_path, monkeypatch):
    """Nothing marks them as complete, so both may have written some."""
    folder = tmp_path / "target"
    write = drained(plain, last=[])
    for value in (1, 2):
        write(folder, value)
    pair = (lambda: write(folder, 1)), (lambda: write(folder, 2))
    for errors in beside_each_call(monkeypatch, folder, lambda: None, *pair):
        assert len({(folder / name).read_text() for name in "abc"}) == 1 or any(errors)


@pytest.mark.parametrize("keep", [None, 1])
def test_who_has_lost_a_root_removes_no_step(tmp_path, monkeypatch, keep):
    """The other one has the lock of the root still."""
    folder, others = tmp_path / "root", []

    def before():
        step(folder, 1)

    def remove():
        with Checkpointer(folder, keep=keep) as checkpointer:
            if keep:
                checkpointer.save(6, state_of(0))
            else:
                checkpointer.remove(5)

    def save():
        others.append(Checkpointer(folder))
        others[-1].save(5, state_of(2))

    for errors in beside_each_call(monkeypatch, folder, before, remove, save):
        others.pop().close()
        assert errors[0] is None or isinstance(errors[0], BlockingIOError)
        if errors[1] is None:
            saved = Checkpointer(folder, verify="checksum").restore(step=5)
            assert value_of(saved) == 2
            assert (folder / ".nvmeio-latest").exists()


def test_who_had_lost_a_root_meanwhile_prunes_no_step(tmp_path, monkeypatch):
    """The other one has gone back to a step, and has ended."""
    folder = tmp_path / "root"

    def before():
        step(folder, 1)

    def save():
        with Checkpointer(folder, keep=1) as checkpointer:
            checkpointer.save(6, state_of(0))

    def go_back():
        with Checkpointer(folder) as checkpointer:
            if 6 in checkpointer.steps():
                checkpointer.remove(6)
            checkpointer.save(5, state_of(2))

    for errors in beside_each_call(monkeypatch, folder, before, save, go_back):
        assert errors[1] is None
        assert read_step(folder) in ({0, 2} - {0 if errors[0] else None})


def test_a_save_that_names_no_file_leaves_the_index_of_another(tmp_path, monkeypatch):
    """This host remembers what the files were like before the other one saved."""
    alone, stat, link, remembered = _sharded.alone_in, os.stat, os.link, {}
    shards(tmp_path, 0)

    def late(folder):
        for path in tmp_path.glob("model-*"):
            remembered[str(path)] = stat(path)
        monkeypatch.setattr(_sharded, "alone_in", alone)
        hugging_face(tmp_path, 2)
        monkeypatch.setattr(os, "stat", remembering)
        monkeypatch.setattr(os, "link", full)
        return alone(folder)

    def full(source, target, **options):
        if "model-0" in target:
            remembered.clear()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target)
        link(source, target, **options)

    def remembering(path, **options):
        return remembered.get(path) or stat(path, **options)

    def asking(path):
        remembered.pop(path, None)

    monkeypatch.setattr(_sharded, "alone_in", late)
    monkeypatch.setattr(replacing, "ask_anew", asking)
    with pytest.raises(OSError, match="No space"):
        shards(tmp_path, 1)
    assert [read(tmp_path) for read in OF_MODELS] == [2, 2]


def test_a_save_removes_nothing_after_a_drain_where_times_are_in_whole_seconds(
    tmp_path, monkeypatch
):
    source, folder = tmp_path / "source", tmp_path / "target"
    file_system(source, 1)
    drain(source, folder).result()
    remove_if = _writing.remove_if

    def held(check, paths):
        published = (folder / ".metadata").stat()
        if not list(folder.glob(".*-tmp")):
            drain(source, folder).result()
            assert (folder / ".metadata").stat().st_size == published.st_size
            times = published.st_atime_ns, published.st_mtime_ns
            os.utime(folder / ".metadata", ns=times)
        remove_if(check, paths)

    monkeypatch.setattr(_writing, "remove_if", held)
    file_system(folder, 2)
    assert read_with(FileSystemReader)(folder) == 1


@pytest.mark.parametrize("collectives", [True, False])
def test_what_a_killed_save_has_set_aside_is_removed_by_the_next(tmp_path, collectives):
    save = file_system if collectives else one_rank
    save(tmp_path, 1)
    child = os.fork()
    if not child:
        unlink = os.unlink

        def killed(path):
            if path.endswith(".nvmeio-old"):
                os._exit(0)
            unlink(path)

        os.unlink = killed
        save(tmp_path, 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert [name for name in os.listdir(tmp_path) if name.endswith(".nvmeio-old")]
    assert read_with(FileSystemReader)(tmp_path) == 2
    save(tmp_path, 3)
    assert len(os.listdir(tmp_path)) == 2
    assert read_with(FileSystemReader)(tmp_path) == 3


def test_ranks_may_drain_to_one_folder_each_with_its_mark(tmp_path, monkeypatch):
    folder = tmp_path / "target"
    for rank in (0, 1):
        source = tmp_path / f"rank-{rank}"
        source.mkdir()
        for name in (f"part-{rank}", f"{MARK}-{rank}.done", "config"):
            (source / name).write_text(name)

    def write(rank):
        drain(tmp_path / f"rank-{rank}", folder, last=["*.done"], retries=0).result()

    pair = (lambda: write(0)), (lambda: write(1))
    for errors in beside_each_call(monkeypatch, folder, lambda: None, *pair):
        assert errors == [None, None]
        assert len(os.listdir(folder)) == 5
