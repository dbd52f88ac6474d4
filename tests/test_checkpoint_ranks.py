"""Checkpointers of several ranks: all restore the same step, or none does."""

import shutil
import warnings

import pytest

pytest.importorskip("torch")

from nvmeio.checkpoint import Checkpointer, CheckpointError
from nvmeio.checkpoint._ranks import agree
from ranks import together
from workloads import checkpoints as work


@pytest.fixture
def roots(tmp_path):
    """The roots of two machines, with the same saves of steps 80, 90 and 100."""
    with Checkpointer(tmp_path / "a", keep=None) as saver:
        for step in (80, 90, 100):
            saver.save(step, {"step": step})
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    return [str(tmp_path / name) for name in ("a", "b")]


def test_ranks_agree_on_the_newest_step_that_all_have(tmp_path, roots):
    """Here one drive lacks the newest, and another has it damaged."""
    shutil.rmtree(f"{roots[0]}/step-90")
    (tmp_path / "b/step-100/tensors.safetensors").unlink()
    for step, restored, said in together(tmp_path, work.agree, 2, roots=roots):
        assert (step, restored) == (80, {"step": 80})
        lacking = ["step 100 is passed over: rank 1", "step 90 is passed over: rank 0"]
        assert [
            words[: len(start)] for words, start in zip(said, lacking, strict=True)
        ] == (lacking)


def test_an_old_list_on_one_rank_changes_nothing(tmp_path, roots):
    """Steps that other ranks list are opened by name."""
    for listed in ({1: [80]}, {0: [], 1: [80, 90]}):
        options = {"roots": roots[:1], "listed": listed}
        for step, restored, said in together(tmp_path, work.agree, 2, **options):
            assert (step, restored, said) == (100, {"step": 100}, [])


def test_copies_count_for_ranks_without_the_step(tmp_path, roots):
    """The job died while step 100 was copied: rank 0 has it, the others cannot."""
    with Checkpointer(roots[0], drain_to=tmp_path / "far", keep=None) as saver:
        saver.save(95, {"step": 95})
    new = [roots[0], str(tmp_path / "new-1"), str(tmp_path / "new-2")]
    for step, restored, said in together(
        tmp_path, work.agree, 3, roots=new, far=str(tmp_path / "far")
    ):
        assert (step, restored) == (95, {"step": 95})
        assert said == [
            "step 100 is passed over: rank 1 has no complete copy of it, and 1 more ranks "
            "neither"
        ]


@pytest.mark.parametrize("copied", [False, True])
def test_two_saves_of_one_step_are_not_the_same_step(tmp_path, roots, copied):
    """A job went on elsewhere, and made other steps of the same numbers."""
    far = tmp_path / "far" if copied else None
    with Checkpointer(roots[0], drain_to=far, keep=None) as saver:
        saver.save(100, {"step": 100, "by": "the one with copies"})
    found = together(
        tmp_path, work.agree, 2, roots=roots, far=None if far is None else str(far)
    )
    if copied:
        # Rank 1 has another one in its root, and reads the copy.
        one = (100, {"step": 100, "by": "the one with copies"}, [])
    else:
        words = "step 100 is passed over: the ranks have different saves of it"
        one = (90, {"step": 90}, [words])
    assert found == [one, one]


def test_ranks_that_each_saved_for_themselves_are_told_so(tmp_path):
    roots = [str(tmp_path / name) for name in ("a", "b")]
    for root in roots:
        Checkpointer(root).save(1, 1)
    found = together(tmp_path, work.agree, 2, roots=roots)
    assert found[0] == found[1]
    assert "these are different saves where the numbers are the same" in found[0]


def test_nothing_is_restored_if_no_step_is_everywhere(tmp_path, roots):
    for step in (80, 100):
        shutil.rmtree(f"{roots[0]}/step-{step}")
    shutil.rmtree(f"{roots[1]}/step-90")
    (tmp_path / "a/.nvmeio-latest").unlink()
    words = "no save of a step is complete on all 2 ranks: "
    words += "rank 0 has [90]; rank 1 has [100, 80]"
    assert together(tmp_path, work.agree, 2, roots=roots) == [words] * 2
    assert (
        together(tmp_path, work.agree, 2, roots=[str(tmp_path / "none")])
        == [(None, None, [])] * 2
    )


@pytest.mark.parametrize("what", ["damaged", "named"])
def test_a_step_that_is_lost_is_no_beginning(tmp_path, roots, what):
    """Here or on another rank: who begins anew would save over what is left."""
    for step in (80, 90):
        shutil.rmtree(f"{roots[0]}/step-{step}")
    if what == "named":
        shutil.rmtree(f"{roots[0]}/step-100")
        words = "step-100 is missing, but "
    else:
        (tmp_path / "a/step-100/tree.json").unlink()
        words = "tree.json is missing"
    with (
        pytest.warns(RuntimeWarning, match="step 100 is skipped"),
        pytest.raises(CheckpointError, match=f"rank 0 cannot read .*{words}"),
    ):
        Checkpointer(roots[0]).agreed_step()
    empty = str(tmp_path / "none")
    found = together(tmp_path, work.agree, 2, roots=[empty, roots[0]])
    assert found[0] == found[1]
    assert found[0].startswith("rank 1 cannot read its checkpoints: ")
    assert words in found[0]


def test_a_step_that_this_process_has_found_damaged_is_no_beginning(tmp_path):
    """Its files have the sizes that were saved."""
    with Checkpointer(tmp_path) as checkpointer:
        path = checkpointer.save(7, {"step": 7}) / "tree.json"
        path.write_bytes(path.read_bytes().replace(b"7", b"8"))
        assert checkpointer.agreed_step() == 7
        with pytest.raises(CheckpointError):
            checkpointer.restore(7)
        with pytest.raises(CheckpointError, match=r"step 7: .*tree\.json is damaged"):
            checkpointer.agreed_step()


def test_a_newest_step_that_is_damaged_everywhere_is_passed_over_with_its_error(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(6, {"step": 6})
        manifest = checkpointer.save(7, {"step": 7}) / "manifest.json"
        (tmp_path / "step-8").mkdir()
        (tmp_path / "step-8/notes").touch()
        text = manifest.read_bytes()
        manifest.write_bytes(text[:50])
        words = f"step 7 is passed over: {manifest}"
        with pytest.warns(RuntimeWarning, match=words) as one:
            assert checkpointer.agreed_step() == 6
        assert len(one) == 1
        # No older step takes the place of one of another version.
        manifest.write_bytes(text.replace(b"checkpoint-2", b"checkpoint-3"))
        with pytest.raises(CheckpointError, match="checkpoint-3"):
            checkpointer.agreed_step()


def test_strangers_folders_are_no_steps(tmp_path):
    (tmp_path / "run/step-9").mkdir(parents=True)
    (tmp_path / "run/step-9/.metadata").touch()
    assert Checkpointer(tmp_path / "run").agreed_step() is None


def test_the_newest_step_is_restored_also_if_it_is_not_the_agreed_one(tmp_path):
    """Asked for by its number, the agreed one is restored, or none."""
    saver, other = Checkpointer(tmp_path), Checkpointer(tmp_path)
    saver.save(30, "agreed")
    assert other.agreed_step() == 30
    saver.save(30, "another")
    with pytest.raises(CheckpointError, match="is another save than the agreed one"):
        other.restore(30)
    assert other.restore() == "another"


def test_the_ranks_look_only_at_the_newest_steps(tmp_path, monkeypatch):
    """However many are kept, and as far back as they must."""
    with Checkpointer(tmp_path, keep=None) as saver:
        for step in range(30):
            saver.save(step, step)
        looked = []
        identity = saver._steps.root.identity

        def watched(step):
            looked.append(step)
            return identity(step)

        monkeypatch.setattr(saver._steps.root, "identity", watched)
        assert agree(saver._steps, lambda mine: [mine, mine]) == 29
        assert len(looked) <= 10
        for step in range(3, 30):
            (tmp_path / f"step-{step}/tree.json").unlink()
        assert agree(saver._steps, lambda mine: [mine, mine]) == 2


def test_a_step_that_is_saved_again_is_no_longer_the_agreed_one(roots):
    with Checkpointer(roots[0]) as saver:
        assert agree(saver._steps, lambda mine: [mine, mine]) == 100
        saver.save(100, "again")
        assert saver.restore(100) == "again"


def test_a_warning_that_is_an_error_comes_after_the_last_exchange(tmp_path):
    """Otherwise other ranks would wait for this one."""
    with Checkpointer(tmp_path, keep=None) as saver:
        for step in range(10):
            saver.save(step, step)
        exchanged = []

        def gather(mine):
            exchanged.append(mine)
            found, failed = mine
            other = (
                {step: saves if step < 1 else [] for step, saves in found.items()}
                if (isinstance(found, dict))
                else found
            )
            return [mine, (other, failed)]

        with pytest.warns(RuntimeWarning, match="is passed over") as told:
            assert agree(saver._steps, gather) == 0
        count = len(exchanged)
        assert len(told) == 9
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(RuntimeWarning, match="step 9 is passed over"):
                agree(saver._steps, gather)
        # The lists are the same at the end as before.
        assert exchanged[0] == exchanged[count - 1]
        assert len(exchanged) == 2 * count == 8


def test_a_process_outside_the_group_is_refused(tmp_path, roots):
    found = together(tmp_path, work.agree_in_group, 2, root=roots[0], members=[0])
    assert found[0] == 100
    assert found[1].startswith("group is ")
    assert "which this process, of rank 1, is not in" in found[1]


def test_an_error_of_one_rank_is_raised_on_all(tmp_path, roots):
    found = together(tmp_path, work.agree, 2, roots=roots, broken=1)
    assert found[0] == found[1]
    assert "rank 1 cannot read its checkpoints: OSError: [Errno 5] broken" in found[0]


def test_copies_that_cannot_be_listed_keep_nobody_from_agreeing_on_what_is_here(
    tmp_path, monkeypatch
):
    memory = pytest.importorskip("fsspec.implementations.memory").MemoryFileSystem
    with Checkpointer(tmp_path / "run", drain_to=f"memory://{tmp_path}/ranks") as saver:
        saver.save(20, "state")
        saver.drained.result()
        monkeypatch.setattr(memory, "ls", lambda *_, **__: 1 / 0)
        with pytest.warns(RuntimeWarning, match="cannot be listed"):
            assert saver.agreed_step() == 20
        assert saver.restore(20) == "state"
