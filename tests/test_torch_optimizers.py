"""Optimizers with their states in files: identical results, and every part of the API."""

import contextlib
import copy
import errno
import gc
import os
import pickle
import shutil
import types
import warnings
import weakref
from pathlib import Path

import numpy as np
import pytest

import nvmeio
from children import Child, can_fork, run_child
from helpers import ENGINES, MIB
from mounts import Filler

torch = pytest.importorskip("torch", reason="torch is not installed")

# Imported after the check, because the module needs torch.
from torch.optim.optimizer import (  # noqa: E402
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import nvmeio.torch  # noqa: E402
from nvmeio._memory.deferred import Deferred, DeferredState  # noqa: E402
from nvmeio.checkpoint import Checkpointer  # noqa: E402
from nvmeio.torch._offload import plan, store  # noqa: E402
from workloads.optimizers import (  # noqa: E402
    FORMS,
    KINDS,
    equal,
    give_gradients,
    make_params,
    state_equal,
    supports,
)

optim = torch.optim

CASES = [(kind, form) for kind in KINDS for form in FORMS if supports(kind, form)]

devices = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=pytest.mark.skipif(
                not torch.cuda.is_available(), reason="no CUDA device"
            ),
        ),
    ],
)


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread, because with several torch's sums vary in their last bits."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


def pair(folder, kind="AdamW", form="loop", memory="8MiB", device="cpu", complex_too=True):
    """Make an ordinary and an offloaded optimizer with equal parameters."""
    make = KINDS[kind]
    fused = form == "fused"
    ours, theirs = (
        make_params(device, complex_too=not fused and complex_too) for _ in range(2)
    )
    ordinary = make(theirs, **FORMS[form])
    offloaded = nvmeio.torch.offload(make(ours, **FORMS[form]), folder, memory=memory)
    return theirs, ordinary, ours, offloaded


@pytest.fixture
def both(tmp_path):
    """An ordinary and an offloaded optimizer, after their parameters."""
    made = pair(tmp_path)
    with made[-1]:
        yield made


def run(steps, theirs, ordinary, ours, offloaded, begin=0):
    """Take steps with both, and compare all parameters after each."""
    for number in range(begin, begin + steps):
        give_gradients(theirs, ours, number)
        ordinary.step()
        offloaded.step()
        assert equal(theirs, ours), f"step {number}"


class TestTheSame:
    @devices
    @pytest.mark.parametrize(("kind", "form"), CASES)
    def test_steps_are_identical_to_the_bit(self, kind, form, device, tmp_path):
        theirs, ordinary, ours, offloaded = pair(tmp_path, kind, form, device=device)
        with offloaded:
            # With any `memory`, a window has only a part of the large parameter.
            assert (len(offloaded._pieces[ours[0]]) > 1) != (
                (kind, form) == ("SGD without states", "fused")
            )
            assert len(offloaded._pieces[ours[1]]) == 1
            run(6, theirs, ordinary, ours, offloaded)
            assert state_equal(ordinary.state_dict(), offloaded.state_dict())

    @pytest.mark.parametrize("engine", ENGINES)
    def test_every_engine_trains_alike(self, engine, folder, monkeypatch):
        monkeypatch.setenv("NVMEIO_ENGINE", engine)
        theirs, ordinary, ours, offloaded = pair(folder / "states")
        with offloaded:
            run(6, theirs, ordinary, ours, offloaded)
            assert offloaded._store.handle.engine == engine
            assert offloaded._store.handle.stats()["requests"] > 6

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
    def test_other_dtypes_train_alike(self, dtype, form, tmp_path):
        parts = [
            [torch.nn.Parameter(torch.linspace(-1, 1, 70_001).to(dtype)) for _ in range(2)]
            for _ in range(2)
        ]
        ordinary = optim.AdamW(parts[0], **FORMS[form])
        inner = optim.AdamW(parts[1], **FORMS[form])
        with nvmeio.torch.offload(inner, tmp_path) as offloaded:
            run(3, parts[0], ordinary, parts[1], offloaded)

    def test_existing_states_are_taken_over(self, tmp_path):
        ours, theirs = make_params(), make_params()
        ordinary, inner = optim.AdamW(theirs), optim.AdamW(ours)
        run(2, theirs, ordinary, ours, inner)
        with nvmeio.torch.offload(inner, tmp_path, memory="8MiB") as offloaded:
            run(2, theirs, ordinary, ours, offloaded, begin=2)
            assert state_equal(ordinary.state_dict(), offloaded.state_dict())

    @pytest.mark.skipif(
        not can_fork(), reason="sanitizers cannot follow forks of a process with threads"
    )
    def test_training_with_forked_workers_of_a_loader(self, tmp_path):
        theirs, ordinary, ours, offloaded = pair(tmp_path)
        data = torch.utils.data.TensorDataset(torch.arange(64.0))
        loader = torch.utils.data.DataLoader(
            data, batch_size=8, num_workers=2, multiprocessing_context="fork"
        )
        with offloaded:
            for number, (batch,) in enumerate(loader):
                assert len(batch) == 8
                run(1, theirs, ordinary, ours, offloaded, begin=number)
        assert number == 7


class TestAsAnOptimizer:
    def test_groups_and_defaults_are_those_of_the_inner_optimizer(self, tmp_path):
        _, ordinary, _, offloaded = pair(tmp_path)
        with offloaded:
            assert isinstance(offloaded, optim.Optimizer)
            assert offloaded.param_groups is offloaded.inner.param_groups
            offloaded.load_state_dict(ordinary.state_dict())
            assert offloaded.param_groups is offloaded.inner.param_groups
            assert offloaded.defaults is offloaded.inner.defaults
            offloaded.param_groups[0]["lr"] = 0.25
            assert offloaded.inner.param_groups[0]["lr"] == 0.25
            assert "AdamW" in repr(offloaded)
            assert str(tmp_path) in repr(offloaded)

    @pytest.mark.parametrize("when", ["before", "after", "of the inner one"])
    @pytest.mark.parametrize(
        "make",
        [
            lambda optimizer: optim.lr_scheduler.LinearLR(optimizer, total_iters=50),
            lambda optimizer: optim.lr_scheduler.OneCycleLR(
                optimizer, max_lr=0.1, total_steps=9
            ),
        ],
        ids=["LinearLR", "OneCycleLR"],
    )
    def test_schedulers_work(self, make, when, tmp_path):
        theirs, ours = make_params(), make_params()
        ordinary, inner = optim.AdamW(theirs), optim.AdamW(ours)
        schedulers = [make(ordinary), make(inner) if when == "before" else None]
        with (
            warnings.catch_warnings(),
            nvmeio.torch.offload(inner, tmp_path, memory="8MiB") as offloaded,
        ):
            # Such as a warning that steps are out of order.
            warnings.simplefilter("error")
            if when != "before":
                schedulers[1] = make(offloaded if when == "after" else inner)
            for number in range(6):
                run(1, theirs, ordinary, ours, offloaded, begin=number)
                for each in schedulers:
                    each.step()
            rates = [each.param_groups[0]["lr"] for each in (ordinary, offloaded)]
            assert rates[0] == rates[1] != ordinary.defaults["lr"]

    def test_a_closure_is_called_once_per_step_with_gradients(self, tmp_path):
        _, _, ours, offloaded = pair(tmp_path)
        calls = []

        def closure():
            assert torch.is_grad_enabled()
            calls.append(1)
            give_gradients(ours, ours, 0)
            return 42.0

        with offloaded:
            assert offloaded.step(closure) == 42.0
            assert len(offloaded._windows) > 2
        assert calls == [1]

    def test_hooks_are_called_once_per_step(self, tmp_path):
        calls = []

        def hook(name):
            return lambda optimizer, *_: calls.append((name, type(optimizer).__name__))

        ours = make_params()
        inner = optim.AdamW(ours)
        inner.register_step_pre_hook(hook("inner"))
        with (
            contextlib.closing(nvmeio.torch.offload(inner, tmp_path)) as offloaded,
            contextlib.ExitStack() as stack,
        ):
            offloaded.register_step_post_hook(hook("own"))
            for register, name in (
                (register_optimizer_step_pre_hook, "global before"),
                (register_optimizer_step_post_hook, "global after"),
            ):
                stack.callback(register(hook(name)).remove)
            give_gradients(ours, ours, 0)
            offloaded.step()
        names = ["global before", "inner", "own", "global after"]
        assert calls == [(name, "OffloadedOptimizer") for name in names]

    def test_hooks_of_state_dicts_are_called(self, tmp_path):
        _, ordinary, _, offloaded = pair(tmp_path)
        calls = []
        for name in ("state_dict_pre", "state_dict_post", "load_state_dict_post"):
            register = getattr(offloaded, f"register_{name}_hook")
            register(lambda *_, name=name: calls.append(name))
        offloaded.register_load_state_dict_pre_hook(
            lambda _, found: {
                **found,
                "param_groups": ordinary.state_dict()["param_groups"],
            }
        )
        with offloaded:
            found = offloaded.state_dict()
            offloaded.load_state_dict({"state": found["state"], "param_groups": "changed"})
        assert calls == ["state_dict_pre", "state_dict_post", "load_state_dict_post"]

    def test_a_compiled_loop_trains_alike(self, tmp_path):
        theirs, ordinary, ours, offloaded = pair(tmp_path, complex_too=False)

        def train(params, optimizer, factor):
            optimizer.zero_grad()
            sum((param * factor).square().sum() for param in params).backward()
            optimizer.step()

        with offloaded:
            compiled = torch.compile(train, backend="eager")
            for number in range(3):
                factor = torch.tensor(number + 1.0)
                train(theirs, ordinary, factor)
                compiled(ours, offloaded, factor)
                assert equal(theirs, ours)
        torch.compiler.reset()

    def test_zero_grad_works(self, tmp_path):
        _, _, ours, offloaded = pair(tmp_path)
        give_gradients(ours, ours, 0)
        with offloaded:
            offloaded.zero_grad(set_to_none=False)
            assert all(param.grad is None or not param.grad.any() for param in ours)
            offloaded.zero_grad()
            assert all(param.grad is None for param in ours)

    @devices
    @pytest.mark.parametrize("form", FORMS)
    def test_grad_scaler_works(self, form, device, tmp_path):
        theirs, ordinary, ours, offloaded = pair(
            tmp_path, "Adam", form, device=device, complex_too=False
        )
        scalers = [
            torch.amp.GradScaler(device, init_scale=8.0, growth_interval=2)
            for _ in range(2)
        ]
        with offloaded:
            for number in range(6):
                give_gradients(theirs, ours, number)
                if number in (0, 3):
                    theirs[1].grad[0, 0] = ours[1].grad[0, 0] = torch.inf
                for scaler, optimizer in zip(scalers, (ordinary, offloaded), strict=True):
                    # As backward() of a scaled loss would have made them.
                    scaler.scale(torch.zeros((), device=device))
                    scaler.step(optimizer)
                    scaler.update()
                assert scalers[0].get_scale() == scalers[1].get_scale()
                assert equal(theirs, ours), f"step {number}"
            assert state_equal(ordinary.state_dict(), offloaded.state_dict())

    def test_state_is_read_on_access(self, both):
        theirs, ordinary, ours, offloaded = both
        run(2, theirs, ordinary, ours, offloaded)
        assert len(offloaded.state) == len(ordinary.state)
        for one, other in zip(theirs, ours, strict=True):
            assert state_equal(dict(ordinary.state[one]), offloaded.state[other])
        with pytest.raises(KeyError, match=r"shape \(7.* has 8"):
            offloaded.state[theirs[0]]

    def test_state_is_written_when_it_is_assigned(self, both):
        theirs, ordinary, ours, offloaded = both
        run(1, theirs, ordinary, ours, offloaded)
        # Lightning moves states to a device like this.
        for optimizer in (ordinary, offloaded):
            for param, state in optimizer.state.items():
                optimizer.state[param] = {name: 2 * state[name] for name in state}
        run(2, theirs, ordinary, ours, offloaded, begin=1)
        assert state_equal(ordinary.state_dict(), offloaded.state_dict())
        items = offloaded.state_items()
        with pytest.raises(ValueError, match="a state 'stranger' of parameter 1"):
            offloaded.state[ours[1]] = {"stranger": torch.ones(3)}
        ordinary.state[theirs[0]], offloaded.state[ours[0]] = {}, {}
        with pytest.raises(RuntimeError, match="have changed since"):
            list(items)
        run(2, theirs, ordinary, ours, offloaded, begin=3)

    def test_a_parameter_has_a_state_after_its_first_update(self, both):
        theirs, ordinary, ours, offloaded = both
        theirs[0].grad, ours[0].grad = (torch.ones(700_001) for _ in range(2))
        for _ in range(2):
            assert [param in ordinary.state for param in theirs] == [
                param in offloaded.state for param in ours
            ]
            ordinary.step()
            offloaded.step()

    def test_the_helpers_of_distributed_checkpoints_accept_it(self, tmp_path):
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        models = [torch.nn.Linear(30, 40) for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        ordinary, inner = (optim.AdamW(model.parameters()) for model in models)
        with nvmeio.torch.offload(inner, tmp_path) as offloaded:
            for model, optimizer in zip(models, (ordinary, offloaded), strict=True):
                model(torch.ones(30)).sum().backward()
                optimizer.step()
            found = [
                get_optimizer_state_dict(model, optimizer)
                for model, optimizer in zip(models, (ordinary, offloaded), strict=True)
            ]
            assert state_equal(*found)


class TestGroups:
    def test_a_group_added_later_has_a_file(self, both):
        theirs, ordinary, ours, offloaded = both
        run(2, theirs, ordinary, ours, offloaded)
        before = offloaded.nbytes
        more = [make_params()[1:3] for _ in range(2)]
        ordinary.add_param_group({"params": more[0], "lr": 0.5})
        offloaded.add_param_group({"params": more[1], "lr": 0.5})
        assert offloaded.nbytes > before
        theirs, ours = [*theirs, *more[0]], [*ours, *more[1]]
        run(3, theirs, ordinary, ours, offloaded, begin=2)
        assert state_equal(ordinary.state_dict(), offloaded.state_dict())

    def test_parameters_and_options_may_change(self, tmp_path):
        theirs, ordinary, ours, offloaded = pair(tmp_path, "Adam")
        with offloaded:
            run(2, theirs, ordinary, ours, offloaded)
            for params, optimizer in ((theirs, ordinary), (ours, offloaded)):
                del optimizer.param_groups[0]["params"][1]
                optimizer.param_groups.append(
                    {**optimizer.param_groups[0], "params": [params[1]], "lr": 0.125}
                )
            run(2, theirs, ordinary, ours, offloaded, begin=2)
            for optimizer in (ordinary, offloaded):
                optimizer.param_groups[0]["weight_decay"] = 0.5
                optimizer.param_groups[1]["foreach"] = True
            run(2, theirs, ordinary, ours, offloaded, begin=4)
            for optimizer in (ordinary, offloaded):
                del optimizer.param_groups[0]
            run(2, theirs, ordinary, ours, offloaded, begin=6)
            # torch keeps the states of removed parameters.
            assert list(offloaded.state) == [ours[1]]
            assert state_equal(dict(ordinary.state[theirs[1]]), offloaded.state[ours[1]])

    def test_memory_of_parameters_may_be_replaced(self, tmp_path):
        theirs, ours = (
            [torch.nn.Parameter(torch.linspace(-1, 1, 810_000).view(900, 900))]
            for _ in range(2)
        )
        ordinary = optim.AdamW(theirs)
        with nvmeio.torch.offload(optim.AdamW(ours), tmp_path, memory="8MiB") as offloaded:
            run(1, theirs, ordinary, ours, offloaded)
            assert len(offloaded._pieces[ours[0]]) > 1
            for param in (*theirs, *ours):
                param.grad, param.data = None, param.data.t().contiguous().t()
            run(2, theirs, ordinary, ours, offloaded, begin=1)
            # Under this mode programs allocate elsewhere, but states do not.
            with torch.device("meta"):
                offloaded.load_state_dict(ordinary.state_dict())
            run(1, theirs, ordinary, ours, offloaded, begin=3)
            for param in (*theirs, *ours):
                param.grad, param.data = None, torch.zeros(900, 1800)[:, ::2]
            with pytest.raises(ValueError, match="cannot be split"):
                run(1, ours, offloaded, theirs, ordinary, begin=4)

    def test_states_that_no_longer_fit_change_nothing(self, tmp_path):
        theirs, ordinary, ours, offloaded = pair(tmp_path, complex_too=False)
        with offloaded:
            run(2, theirs, ordinary, ours, offloaded)
            before = ours[1].data
            for other in (before.half(), before.double(), before[:50]):
                ours[1].grad, ours[1].data = None, other
                with pytest.raises(ValueError, match="a state 'exp_avg' of parameter 1"):
                    offloaded.step()
                with pytest.raises(ValueError, match="a state 'exp_avg' of parameter 1"):
                    offloaded.add_param_group({"params": make_params()})
                assert len(offloaded.param_groups) == 1
                assert state_equal(ordinary.state_dict(), offloaded.state_dict())
            ours[1].data = before
            run(2, theirs, ordinary, ours, offloaded, begin=2)

    @pytest.mark.parametrize("name", ["windows_of", "segments_of"])
    def test_an_interruption_of_a_new_plan_leaves_the_old_one(
        self, name, tmp_path, monkeypatch
    ):
        theirs, ordinary, ours, offloaded = pair(tmp_path)

        def interrupted(*_):
            raise KeyboardInterrupt

        with offloaded:
            run(2, theirs, ordinary, ours, offloaded)
            before = offloaded.nbytes
            monkeypatch.setattr(f"nvmeio.torch.optimizers.{name}", interrupted)
            with pytest.raises(KeyboardInterrupt):
                offloaded.add_param_group({"params": make_params()})
            offloaded.param_groups[0]["foreach"] = True
            with pytest.raises(KeyboardInterrupt):
                offloaded.step()
            monkeypatch.undo()
            assert offloaded.nbytes == before
            assert state_equal(
                ordinary.state_dict()["state"], offloaded.state_dict()["state"]
            )
            ordinary.param_groups[0]["foreach"] = True
            run(1, theirs, ordinary, ours, offloaded, begin=2)

    def test_files_left_by_an_interruption_are_removed(self, tmp_path, monkeypatch):
        theirs, ordinary, ours, offloaded = pair(tmp_path)

        def interrupted(_):
            raise KeyboardInterrupt

        with offloaded:
            run(1, theirs, ordinary, ours, offloaded)
            monkeypatch.setattr("nvmeio.torch._offload.store._remove", interrupted)
            for optimizer in (ordinary, offloaded):
                optimizer.param_groups[0]["foreach"] = True
            with pytest.raises(KeyboardInterrupt):
                offloaded.step()
            monkeypatch.undo()
            assert len(list(tmp_path.glob("*.states.*"))) == 2
            offloaded.load_state_dict(ordinary.state_dict())
            assert len(list(tmp_path.glob("*.states.*"))) == 1
            run(2, theirs, ordinary, ours, offloaded, begin=1)

    def test_a_group_that_is_added_again_has_its_states(self, tmp_path):
        theirs, ours = make_params(), make_params()
        halves = [
            [{"params": each[::2]}, {"params": each[1::2]}] for each in (theirs, ours)
        ]
        ordinary, inner = map(optim.AdamW, halves)
        run(2, theirs, ordinary, ours, inner)
        left = [each.param_groups.pop() for each in (ordinary, inner)]
        with nvmeio.torch.offload(inner, tmp_path, memory="8MiB") as offloaded:
            run(1, theirs, ordinary, ours, offloaded, begin=2)
            items = offloaded.state_items()
            ordinary.param_groups.append(left[0])
            offloaded.add_param_group(left[1])
            with pytest.raises(RuntimeError, match="have changed since state_items"):
                list(items)
            run(2, theirs, ordinary, ours, offloaded, begin=3)
            assert not offloaded._others
            found = dict(offloaded.state.items())
            for one, other in zip(theirs, ours, strict=True):
                assert state_equal(dict(ordinary.state[one]), found[other])

    def test_many_small_groups_share_windows(self, tmp_path):
        parts = [[torch.nn.Parameter(torch.ones(7)) for _ in range(40)] for _ in range(2)]
        groups = [
            [{"params": [param], "lr": 0.01 * i} for i, param in enumerate(params)]
            for params in parts
        ]
        ordinary = optim.Adam(groups[0])
        with nvmeio.torch.offload(optim.Adam(groups[1]), tmp_path) as offloaded:
            assert len(offloaded._windows) == 1
            run(3, parts[0], ordinary, parts[1], offloaded)


class TestWindows:
    def test_the_next_window_is_read_and_the_last_written_during_an_update(
        self, tmp_path, monkeypatch
    ):
        theirs, ordinary, ours, offloaded = pair(tmp_path)
        with offloaded:
            run(1, theirs, ordinary, ours, offloaded)
            seen, update = [], offloaded._update
            count = len(offloaded._windows)
            handle = offloaded._store.handle
            begun = handle.stats()["requests"]

            def waiting(*arguments):
                # Requests in flight end without help of this thread.
                handle.drain()
                seen.append(handle.stats()["requests"] - begun)
                update(*arguments)

            monkeypatch.setattr(offloaded, "_update", waiting)
            run(1, theirs, ordinary, ours, offloaded, begin=1)
        # Reads of this window and the next two; writes of the earlier ones.
        ahead = plan.BUFFERS
        assert seen == [min(i + ahead, count) + i for i in range(count)]

    def test_memory_is_read_into_only_after_it_was_written(self, tmp_path, monkeypatch):
        theirs, ordinary, ours, offloaded = pair(tmp_path)
        with offloaded:
            run(1, theirs, ordinary, ours, offloaded)
            handle, written, befores = offloaded._store.handle, {}, []

            class Noting:
                def __getattr__(self, name):
                    return getattr(handle, name)

                def submit_write_many(self, items):
                    request = handle.submit_write_many(items)
                    written[items[0][0].data_ptr()] = request
                    return request

                def submit_read_many(self, items, *, after):
                    befores.append((after, written.get(items[0][0].data_ptr())))
                    return handle.submit_read_many(items, after=after)

            monkeypatch.setattr(offloaded._store, "handle", Noting())
            run(1, theirs, ordinary, ours, offloaded, begin=1)
            assert len(befores) == len(offloaded._windows) > plan.BUFFERS
        assert all(after is before for after, before in befores)
        assert sum(after is not None for after, _ in befores) == len(befores) - plan.BUFFERS

    def test_waits_for_the_drive_are_counted_and_nothing_else(self, tmp_path, monkeypatch):
        theirs, ordinary, ours, offloaded = pair(tmp_path)
        clock = types.SimpleNamespace(now=0, perf_counter=lambda: clock.now)
        waits = []

        class Slow:
            """A request whose wait takes 7 simulated seconds."""

            def __init__(self, request):
                self.request, self.cancel = request, request.cancel
                self.nbytes = request.nbytes

            def done(self):
                return False

            def wait(self):
                clock.now += 7
                waits.append(self)
                return self.request.wait()

        class Handle:
            """The optimizer's handle, with slow requests."""

            def submit_read_many(self, items, after=None):
                return Slow(own.submit_read_many(items, after=after and after.request))

            def submit_write_many(self, items):
                return Slow(own.submit_write_many(items))

        def update(*arguments):
            clock.now += 100
            updated(*arguments)

        with offloaded:
            run(1, theirs, ordinary, ours, offloaded)
            own, updated = offloaded._store.handle, offloaded._update
            before = offloaded.waited
            assert before > 0
            monkeypatch.setattr(store, "time", clock)
            monkeypatch.setattr(offloaded._store, "handle", Handle())
            monkeypatch.setattr(offloaded, "_update", update)
            run(1, theirs, ordinary, ours, offloaded, begin=1)
            # One read and one write of each window.
            assert len(set(waits)) == 2 * len(offloaded._windows)
            assert offloaded.waited - before == pytest.approx(7 * len(waits))

    def test_only_states_of_parameters_with_gradients_move(self, both):
        theirs, ordinary, ours, offloaded = both
        run(1, theirs, ordinary, ours, offloaded)
        before = moved(offloaded)
        for param in (*theirs, *ours):
            param.grad = None
        theirs[1].grad, ours[1].grad = (torch.ones(100, 77) for _ in range(2))
        ordinary.step()
        offloaded.step()
        assert equal(theirs, ours)
        # Two states of it, read and written, with the ends of pages and the generation
        # tables.
        assert moved(offloaded) - before < 2 * 2 * ours[1].nbytes + 8 * 4096

    @pytest.mark.parametrize("form", FORMS)
    def test_memory_of_a_step_stays_within_the_limit(self, form, tmp_path):
        found = run_child(
            "measure_growth", folder=str(tmp_path), form=form, memory=8 * MIB
        ).report
        assert len(found) >= 4
        for kind, growth in found.items():
            assert growth <= (8 + 64) * MIB, kind

    def test_memory_of_loading_stays_within_the_limit(self, tmp_path):
        found = run_child("measure_loading", folder=str(tmp_path), memory=8 * MIB).report
        assert found["same"]
        assert found["growth"] <= (8 + 64) * MIB

    def test_a_parameter_that_cannot_be_split_is_named(self, tmp_path):
        # Every other row: its elements are not contiguous.
        param = torch.nn.Parameter(torch.ones(4000, 1000)[::2])
        inner = optim.AdamW([torch.nn.Parameter(torch.ones(3)), param])
        with pytest.raises(
            ValueError, match=r"parameter 1 \(group 0, shape \(2000, 1000\)\)"
        ):
            nvmeio.torch.offload(inner, tmp_path / "states", memory="16MiB")
        assert not (tmp_path / "states").exists()
        nvmeio.torch.offload(inner, tmp_path / "states", memory="128MiB").close()

    def test_a_gradient_may_have_other_strides_of_axes_of_length_1(self, tmp_path):
        shape = (900, 900, 1, 1)
        theirs, ours = ([torch.nn.Parameter(torch.ones(shape))] for _ in range(2))
        for params in (theirs, ours):
            grad = torch.linspace(0, 1, 810_000).view(900, 1, 1, 900)
            # Autograd gets such gradients from a convolution in channels_last.
            params[0].grad = grad.permute(0, 3, 1, 2)
            assert params[0].grad.stride() != params[0].stride()
        ordinary = optim.AdamW(theirs)
        with nvmeio.torch.offload(optim.AdamW(ours), tmp_path, memory="8MiB") as offloaded:
            for _ in range(2):
                ordinary.step()
                offloaded.step()
            assert equal(theirs, ours)

    def test_another_default_device_changes_nothing(self, tmp_path):
        weight = torch.linspace(0, 1, 1200).view(10, 3, 8, 5)
        theirs, ours = (
            [torch.nn.Parameter(weight.to(memory_format=torch.channels_last))]
            for _ in range(2)
        )
        for params in (theirs, ours):
            params[0].grad = params[0].detach().clone()
        ordinary = optim.AdamW(theirs)
        ordinary.step()
        states = copy.deepcopy(ordinary.state_dict())
        for name in ("exp_avg", "exp_avg_sq"):
            # As checkpoints in an order other than the parameter's have them.
            states["state"][0][name] = states["state"][0][name].contiguous()
        ours[0].data.copy_(theirs[0].data)
        with nvmeio.torch.offload(optim.AdamW(ours), tmp_path) as offloaded:
            with torch.device("meta"):
                offloaded.load_state_dict(states)
                offloaded.step()
            ordinary.step()
            assert equal(theirs, ours)

    def test_a_gradient_of_another_layout_is_refused(self, tmp_path):
        theirs, ours = ([torch.nn.Parameter(torch.ones(1500, 1000))] for _ in range(2))
        for params in (theirs, ours):
            params[0].grad = torch.linspace(0, 1, 1_500_000).view(1000, 1500).t()
        ordinary = optim.AdamW(theirs)
        offloaded = nvmeio.torch.offload(optim.AdamW(ours), tmp_path / "1", memory="16MiB")
        with offloaded:
            with pytest.raises(ValueError, match="cannot be split"):
                offloaded.step()
            # Nothing has changed, and the next gradient may have its parameter's layout.
            ours[0].grad = ours[0].grad.contiguous()
            offloaded.step()
            assert offloaded.state[ours[0]]["step"] == 1
        with torch.no_grad():
            ours[0].copy_(theirs[0])
        ours[0].grad = theirs[0].grad.clone()
        assert ours[0].grad.stride() != ours[0].stride()
        offloaded = nvmeio.torch.offload(optim.AdamW(ours), tmp_path / "2", memory="128MiB")
        with offloaded:
            ordinary.step()
            offloaded.step()
            assert equal(theirs, ours)


def moved(offloaded):
    """Return how many bytes a handle has moved."""
    stats = offloaded._store.handle.stats()
    return stats["bytes_direct"] + stats["bytes_buffered"]


class TestStates:
    @pytest.mark.parametrize("how", ["state_dict", "state_items"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_states_are_loaded_into_another_offloaded_optimizer(self, kind, how, tmp_path):
        theirs, ordinary, ours, offloaded = pair(tmp_path / "1", kind)
        run(3, theirs, ordinary, ours, offloaded)
        again = make_params()
        with torch.no_grad():
            for param, source in zip(again, ours, strict=True):
                param.copy_(source)
        with (
            offloaded,
            nvmeio.torch.offload(KINDS[kind](again), tmp_path / "2") as other,
        ):
            other.load_state_dict(getattr(offloaded, how)())
            run(2, theirs, ordinary, again, other, begin=3)
            assert state_equal(ordinary.state_dict(), other.state_dict())

    def test_states_are_loaded_from_and_into_an_ordinary_optimizer(self, both):
        theirs, ordinary, ours, offloaded = both
        run(2, theirs, ordinary, ours, offloaded)
        # In another dtype, and with steps as numbers, as in old versions of torch.
        found = copy.deepcopy(ordinary.state_dict())
        for state in found["state"].values():
            if not state["exp_avg"].is_complex():
                state["exp_avg"] = state["exp_avg"].double()
            state["step"] = int(state["step"])
        offloaded.load_state_dict(found)
        assert state_equal(ordinary.state_dict(), offloaded.state_dict())
        ordinary.load_state_dict(offloaded.state_dict())
        run(2, theirs, ordinary, ours, offloaded, begin=2)

    @pytest.mark.parametrize("how", ["offload", "state_dict", "state_items", "assigned"])
    @pytest.mark.parametrize(
        ("kind", "off"),
        [
            ("SGD", {"momentum": 0, "nesterov": False}),
            ("Adam, amsgrad", {"amsgrad": False}),
            ("RMSprop", {"momentum": 0, "centered": False}),
        ],
    )
    def test_states_of_options_that_are_off_stay(self, kind, off, how, tmp_path):
        theirs, ordinary, ours, before = pair(tmp_path / "1", kind)
        with before:
            run(2, theirs, ordinary, ours, before)
            on = {name: ordinary.param_groups[0][name] for name in off}
            for each in (ordinary, before):
                each.param_groups[0].update(off)
            run(1, theirs, ordinary, ours, before, begin=2)
            found = getattr(before, "state_items" if how == "state_items" else "state_dict")
            inner = KINDS[kind](ours, foreach=False)
            if how == "offload":
                inner.load_state_dict(found())
            with nvmeio.torch.offload(inner, tmp_path / "2", memory="8MiB") as offloaded:
                if how == "assigned":
                    offloaded.param_groups[0].update(off)
                    for param in before.state:
                        offloaded.state[param] = before.state[param]
                elif how != "offload":
                    offloaded.load_state_dict(found())
                assert state_equal(ordinary.state_dict(), offloaded.state_dict())
                run(1, theirs, ordinary, ours, offloaded, begin=3)
                for each in (ordinary, offloaded):
                    each.param_groups[0].update(on)
                run(2, theirs, ordinary, ours, offloaded, begin=4)
                assert state_equal(ordinary.state_dict(), offloaded.state_dict())

    def test_state_items_need_memory_for_one_state_at_a_time(self, both):
        theirs, ordinary, ours, offloaded = both
        run(1, theirs, ordinary, ours, offloaded)
        before = moved(offloaded)
        items = iter(offloaded.state_items())
        assert next(items)[0] == "param_groups"
        assert next(items)[0] == "state/0/step"
        assert moved(offloaded) == before
        name, tensor = next(items)
        assert name == "state/0/exp_avg"
        assert torch.equal(tensor, ordinary.state[theirs[0]]["exp_avg"])
        assert moved(offloaded) - before < 1.1 * tensor.nbytes

    @pytest.mark.parametrize("how", ["save", "save_async"])
    def test_states_are_saved_in_a_checkpoint(self, how, tmp_path):
        theirs, ordinary, ours, offloaded = pair(tmp_path / "states")
        with offloaded, Checkpointer(tmp_path / "run") as checkpointer:
            run(2, theirs, ordinary, ours, offloaded)
            saved = getattr(checkpointer, how)(1, {"optimizer": offloaded.state_items()})
            if how == "save_async":
                # The states were copied.
                run(1, theirs, ordinary, ours, offloaded, begin=2)
                saved.result()
                give_gradients(theirs, theirs, 0)
                ordinary = None
            found = checkpointer.restore()["optimizer"]
            if ordinary is not None:
                # Tensors are restored in C order.
                assert state_equal(ordinary.state_dict(), found, strided=False)
            assert found["state"][0]["step"] == 2
            # Each parameter's states are read in turn.
            groups = checkpointer.restore(names=["optimizer/param_groups"])
            groups = groups["optimizer"]["param_groups"]

            def pairs():
                yield "param_groups", groups
                for index in groups[0]["params"]:
                    part = checkpointer.restore(names=[f"optimizer/state/{index}"])
                    for name, value in part["optimizer"]["state"][index].items():
                        yield f"state/{index}/{name}", value

            offloaded.load_state_dict(pairs())
            assert state_equal(offloaded.state_dict(), found, strided=False)

    def test_state_items_are_a_snapshot(self, both):
        theirs, ordinary, ours, offloaded = both
        run(1, theirs, ordinary, ours, offloaded)
        pairs = list(offloaded.state_items())
        before = copy.deepcopy(pairs)
        run(1, theirs, ordinary, ours, offloaded, begin=1)
        assert state_equal(pairs, before)

    def test_state_items_have_the_numbers_at_the_call(self, both):
        theirs, ordinary, ours, offloaded = both
        offloaded.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
        run(1, theirs, ordinary, ours, offloaded)
        items, expected = offloaded.state_items(), list(offloaded.state_items())
        offloaded.param_groups.reverse()
        assert state_equal(list(items), expected)

    def test_an_optimizers_own_state_items_are_refused_before_anything_changes(self, both):
        theirs, ordinary, ours, offloaded = both
        run(1, theirs, ordinary, ours, offloaded)
        with pytest.raises(ValueError, match="these states are loaded already"):
            offloaded.load_state_dict(offloaded.state_items())
        offloaded.load_state_dict(list(offloaded.state_items()))
        run(1, theirs, ordinary, ours, offloaded, begin=1)

    def test_state_items_of_a_parameter_must_be_together(self, both):
        theirs, ordinary, ours, offloaded = both
        run(1, theirs, ordinary, ours, offloaded)
        first, *states = offloaded.state_items()
        states.sort(key=lambda pair: pair[0].rsplit("/")[-1], reverse=True)
        with pytest.raises(ValueError, match="'state/0/exp_avg_sq' comes after"):
            offloaded.load_state_dict([first, *states])
        with pytest.raises(RuntimeError, match="half-way"):
            offloaded.step()

    def test_states_that_change_meanwhile_are_not_saved(self, tmp_path):
        theirs, ordinary, ours, offloaded = pair(tmp_path / "states")
        with offloaded, Checkpointer(tmp_path / "run") as checkpointer:
            run(1, theirs, ordinary, ours, offloaded)
            items = offloaded.state_items()
            run(1, theirs, ordinary, ours, offloaded, begin=1)
            with pytest.raises(RuntimeError, match="have changed since state_items"):
                checkpointer.save(1, items)
            with pytest.raises(RuntimeError, match="have changed since state_items"):
                list(items)

    @pytest.mark.parametrize("what", ["step", "load"])
    def test_what_goes_on_is_not_said_to_have_failed(self, both, monkeypatch, what):
        theirs, ordinary, ours, offloaded = both
        run(1, theirs, ordinary, ours, offloaded)
        name = {"step": "_update", "load": "_put"}[what]
        items, method, said = offloaded.state_items(), getattr(offloaded, name), []

        def going_on(*arguments):
            with pytest.raises(RuntimeError) as caught:
                list(items)
            said.append(str(caught.value))
            return method(*arguments)

        monkeypatch.setattr(offloaded, name, going_on)
        if what == "step":
            run(1, theirs, ordinary, ours, offloaded, begin=1)
            assert said
            assert all("step 2 goes on" in each for each in said)
        else:
            offloaded.load_state_dict(offloaded.state_dict())
            offloaded.state[ours[0]] = offloaded.state[ours[0]]
            assert "load_state_dict() goes on" in said[0]
            assert "an assignment to state goes on" in said[1]

    def test_states_that_change_while_they_are_read_are_not_saved(
        self, tmp_path, monkeypatch
    ):
        theirs, ordinary, ours, offloaded = pair(tmp_path / "states")
        with offloaded, Checkpointer(tmp_path / "run") as checkpointer:
            run(1, theirs, ordinary, ours, offloaded)
            items, load = offloaded.state_items(), offloaded._store.load

            def load_late(*arguments):
                found = load(*arguments)
                run(1, theirs, ordinary, ours, offloaded, begin=1)
                return found

            monkeypatch.setattr(offloaded._store, "load", load_late)
            saving = checkpointer.save_async(1, items, stage=False)
            with pytest.raises(RuntimeError, match=r"save_async\(stage=False\), for"):
                saving.result()
            assert checkpointer.steps() == []

    @pytest.mark.parametrize("stage", [False, True])
    def test_states_that_change_while_the_rest_is_written_are_not_saved(
        self, stage, tmp_path
    ):
        theirs, ordinary, ours, offloaded = pair(tmp_path / "states")

        class Late(DeferredState):
            def _tree(self):
                return Deferred(torch.int8, (1,), (1,), self.load)

            def _require_same(self):
                """It has not changed."""

            def load(self):
                # Of the last dtype, so that all states have been read.
                run(1, theirs, ordinary, ours, offloaded, begin=1)
                return torch.zeros(1, dtype=torch.int8)

        with offloaded, Checkpointer(tmp_path / "run") as checkpointer:
            run(1, theirs, ordinary, ours, offloaded)
            state = {"optimizer": offloaded.state_items(), "z": Late()}
            with pytest.raises(RuntimeError, match="have changed since state_items"):
                checkpointer.save_async(1, state, stage=stage).result()
            assert checkpointer.steps() == []

    @pytest.mark.parametrize(
        ("change", "error", "words"),
        [
            (lambda found: 3, TypeError, "state_dict is of type int"),
            (lambda found: {"state": {}}, ValueError, "no 'param_groups'"),
            (lambda found: [("state/0/step", 1)], ValueError, "the first pair is"),
            (
                lambda found: {**found, "param_groups": found["param_groups"] * 2},
                ValueError,
                "different number of parameter groups",
            ),
            (
                lambda found: {
                    **found,
                    "param_groups": [{**found["param_groups"][0], "capturable": True}],
                },
                ValueError,
                "capturable=True",
            ),
        ],
        ids=["no dict", "no groups", "no pairs", "groups", "capturable"],
    )
    def test_refused_states_change_nothing(self, both, change, error, words):
        theirs, ordinary, ours, offloaded = both
        run(1, theirs, ordinary, ours, offloaded)
        with pytest.raises(error, match=words):
            offloaded.load_state_dict(change(ordinary.state_dict()))
        run(1, theirs, ordinary, ours, offloaded, begin=1)

    @pytest.mark.parametrize("key", ["exp_avg", "stranger"])
    def test_after_states_that_do_not_fit_others_must_be_loaded(self, both, key):
        theirs, ordinary, ours, offloaded = both
        run(1, theirs, ordinary, ours, offloaded)
        found = copy.deepcopy(ordinary.state_dict())
        found["state"][1][key] = torch.ones(3)
        with pytest.raises(ValueError, match=f"a state '{key}' of parameter 1"):
            offloaded.load_state_dict(found)
        with pytest.raises(RuntimeError, match="half-way"):
            offloaded.step()
        offloaded.load_state_dict(ordinary.state_dict())
        run(1, theirs, ordinary, ours, offloaded, begin=1)


class TestFailures:
    def cut(self, offloaded, keep):
        """Truncate the file of the states."""
        (path,) = Path(offloaded.folder).glob("*.states.*")
        os.truncate(path, int(path.stat().st_size * keep))

    def test_after_a_failed_step_only_load_state_dict_works(self, both):
        theirs, ordinary, ours, offloaded = both
        run(2, theirs, ordinary, ours, offloaded)
        saved = copy.deepcopy(ordinary.state_dict())
        items = offloaded.state_items()
        before = [param.detach().clone() for param in ours]
        self.cut(offloaded, 0.5)
        give_gradients(theirs, ours, 2)
        with pytest.raises(OSError, match=r"states"):
            offloaded.step()
        assert not equal(before, ours)
        for call in (
            offloaded.step,
            offloaded.state_dict,
            offloaded.state_items,
            lambda: list(items),
            lambda: offloaded.state[ours[0]],
            lambda: offloaded.add_param_group({"params": make_params()}),
        ):
            with pytest.raises(RuntimeError, match="step 3 has failed half-way"):
                call()
        with torch.no_grad():
            for param, source in zip(ours, before, strict=True):
                param.copy_(source)
        offloaded.load_state_dict(saved)
        ordinary.step()
        offloaded.step()
        assert equal(theirs, ours)

    def test_a_failure_before_the_first_update_leaves_the_states_valid(
        self, both, tmp_path
    ):
        theirs, ordinary, ours, offloaded = both
        run(1, theirs, ordinary, ours, offloaded)
        before = [param.detach().clone() for param in ours]
        (path,) = tmp_path.glob("*.states.*")
        content = path.read_bytes()
        self.cut(offloaded, 0)
        give_gradients(theirs, ours, 1)
        for _ in range(2):
            with pytest.raises(OSError, match="states"):
                offloaded.step()
        assert equal(before, ours)
        path.write_bytes(content)
        ordinary.step()
        offloaded.step()
        assert equal(theirs, ours)

    @pytest.mark.parametrize("steps", [0, 2])
    @pytest.mark.parametrize(
        ("form", "lr"),
        [
            # torch refuses the first before it changes anything, the others later.
            ("foreach", torch.tensor(0.1)),
            ("fused", torch.ones(2)),
            ("for-loop", "fast"),
        ],
    )
    def test_a_step_that_torch_refuses_before_any_update_has_not_begun(
        self, tmp_path, form, lr, steps
    ):
        forms = {"foreach": {"foreach": True}, "fused": {"fused": True}}
        made = []
        for _ in range(2):
            params = make_params(complex_too=False)
            options = forms.get(form, {"foreach": False})
            made += [params, torch.optim.AdamW(params, lr=0.01, **options)]
        theirs, ordinary, ours, inner = made
        memory = nvmeio.torch.optimizers.MEMORY_MIN
        with nvmeio.torch.offload(inner, tmp_path, memory=memory) as offloaded:
            run(steps, theirs, ordinary, ours, offloaded)
            before = [param.detach().clone() for param in ours]
            give_gradients(theirs, ours, steps)
            offloaded.param_groups[0]["lr"] = lr
            for _ in range(2):
                with pytest.raises((RuntimeError, TypeError)) as caught:
                    offloaded.step()
                assert "half-way" not in str(caught.value)
            assert equal(before, ours)
            offloaded.param_groups[0]["lr"] = 0.01
            run(2, theirs, ordinary, ours, offloaded, begin=steps)

    def test_a_fused_step_that_torch_refuses_in_its_second_group_is_half_way(
        self, tmp_path
    ):
        """Its kernels do not count versions of what they change."""
        params = [torch.nn.Parameter(torch.ones(8)) for _ in range(2)]
        groups = [{"params": [param]} for param in params]
        inner = torch.optim.AdamW(groups, lr=0.1, fused=True)
        with nvmeio.torch.offload(inner, tmp_path) as offloaded:
            give_gradients(params, params, 0)
            offloaded.step()
            offloaded.param_groups[1]["lr"] = "fast"
            with pytest.raises(TypeError):
                offloaded.step()
            offloaded.param_groups[1]["lr"] = 0.1
            with pytest.raises(RuntimeError, match="step 2 has failed half-way"):
                offloaded.step()

    @pytest.mark.parametrize("kind", [KeyboardInterrupt, TimeoutError])
    def test_a_handler_that_raises_after_a_fused_kernel_leaves_it_half_way(
        self, tmp_path, monkeypatch, kind
    ):
        param = torch.nn.Parameter(torch.ones(8))
        inner = torch.optim.AdamW([param], lr=0.1, fused=True)
        with nvmeio.torch.offload(inner, tmp_path) as offloaded:
            param.grad = torch.ones(8)
            offloaded.step()
            fused = torch._fused_adamw_

            def interrupted(*arguments, **options):
                fused(*arguments, **options)
                raise kind

            monkeypatch.setattr(torch, "_fused_adamw_", interrupted)
            with pytest.raises(kind):
                offloaded.step()
            monkeypatch.undo()
            with pytest.raises(RuntimeError, match="step 2 has failed half-way"):
                offloaded.step()

    @pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
    def test_an_interruption_in_a_window_fails_the_step(self, both, error, monkeypatch):
        theirs, ordinary, ours, offloaded = both
        run(1, theirs, ordinary, ours, offloaded)
        update, calls = offloaded._update, []

        def interrupted(*arguments):
            calls.append(1)
            if len(calls) == 3:
                raise error
            update(*arguments)

        monkeypatch.setattr(offloaded, "_update", interrupted)
        with pytest.raises(error):
            offloaded.step()
        # Nothing is in flight, because the memory is reused.
        assert offloaded._store.handle.pending == 0
        with pytest.raises(RuntimeError, match="step 2 has failed half-way"):
            offloaded.step()

    def test_a_read_that_outlives_ctrl_c_has_its_own_memory(self, both, monkeypatch):
        theirs, ordinary, ours, offloaded = both
        run(1, theirs, ordinary, ours, offloaded)
        handle, update, late = offloaded._store.handle, offloaded._update, []

        class Interrupted:
            def __getattr__(self, name):
                return getattr(handle, name)

            def submit_read_many(self, items, *, after):
                request = handle.submit_read_many(items, after=after)
                request.wait()
                late.extend((memory, memory.clone()) for memory, _, _ in items)
                if after is None and len(late) > 1:
                    raise KeyboardInterrupt
                return request

        monkeypatch.setattr(offloaded._store, "handle", Interrupted())
        give_gradients(theirs, ours, 1)
        with pytest.raises(KeyboardInterrupt):
            offloaded.step()
        monkeypatch.undo()
        run(1, theirs, ordinary, ours, offloaded, begin=1)

        def landing(*arguments):
            for memory, content in late:
                memory.copy_(content)
            update(*arguments)

        monkeypatch.setattr(offloaded, "_update", landing)
        run(1, theirs, ordinary, ours, offloaded, begin=2)

    def test_files_of_a_killed_process_are_replaced(self, tmp_path):
        child = Child("step_and_wait", folder=str(tmp_path))
        child.ready()
        child.stop()
        (left,) = tmp_path.glob("*.states.*")
        # A file of somebody else stays.
        mine = tmp_path / "group-7-7.states"
        mine.write_text("mine")
        theirs, ordinary, ours, offloaded = pair(tmp_path)
        with offloaded:
            assert not left.exists()
            run(2, theirs, ordinary, ours, offloaded)
        assert sorted(tmp_path.iterdir()) == [tmp_path / ".nvmeio-offload-lock", mine]

    def test_a_drive_without_space_is_an_error_before_anything_is_made(self, loop_mount):
        folder = loop_mount("ext4", 64 * MIB) / "states"
        params = [
            torch.nn.Parameter(torch.ones(10 << 20)),
            torch.nn.Parameter(torch.ones(3)),
        ]
        inner = optim.AdamW(params)
        with pytest.raises(OSError, match="are needed, and") as raised:
            nvmeio.torch.offload(inner, folder)
        assert raised.value.errno == errno.ENOSPC
        assert not list(folder.glob("*.states.*"))
        # Nothing was made; and a group without space is not added.
        params[1].grad = torch.ones(3)
        inner.step()
        with nvmeio.torch.offload(optim.AdamW(params[1:]), folder) as offloaded:
            offloaded.step()
            with pytest.raises(OSError, match="are needed, and"):
                offloaded.add_param_group({"params": params[:1]})
            assert len(offloaded.param_groups) == 1
            offloaded.step()
            assert offloaded.state[params[1]]["step"] == 2

    def test_a_full_drive_has_space_for_steps(self, loop_mount):
        folder = loop_mount("ext4", 64 * MIB) / "states"
        theirs, ordinary, ours, offloaded = pair(folder)
        with offloaded:
            Filler(folder)
            run(2, theirs, ordinary, ours, offloaded)

    def test_a_folder_taken_over_by_another_optimizer_is_an_error(self, tmp_path):
        folder = tmp_path / "states"
        theirs, ordinary, ours, offloaded = pair(folder)
        with offloaded:
            run(1, theirs, ordinary, ours, offloaded)
            shutil.rmtree(folder)
            give_gradients(theirs, ours, 1)
            before = [param.detach().clone() for param in ours]
            with pytest.raises(FileNotFoundError, match="states"):
                offloaded.step()
            with pytest.raises(FileNotFoundError, match="states"):
                offloaded.add_param_group({"params": make_params()})
            with nvmeio.torch.offload(optim.AdamW(make_params()), folder):
                names = sorted(folder.iterdir())
                with pytest.raises(BlockingIOError, match=f"process {os.getpid()}"):
                    offloaded.step()
                with pytest.raises(BlockingIOError, match=f"process {os.getpid()}"):
                    offloaded.add_param_group({"params": make_params()})
                assert equal(before, ours)
                offloaded.close()
                assert sorted(folder.iterdir()) == names

    def test_states_are_loaded_without_space_for_a_second_copy(self, loop_mount):
        folder = loop_mount("ext4", 64 * MIB) / "states"
        theirs, ours = ([torch.nn.Parameter(torch.ones(4 << 20))] for _ in range(2))
        ordinary = optim.AdamW(theirs)
        with nvmeio.torch.offload(optim.AdamW(ours), folder) as offloaded:
            run(1, theirs, ordinary, ours, offloaded)
            offloaded.load_state_dict(ordinary.state_dict())
            run(1, theirs, ordinary, ours, offloaded, begin=1)

    def test_states_changed_by_another_program_are_an_error(self, both, tmp_path):
        theirs, ordinary, ours, offloaded = both
        run(2, theirs, ordinary, ours, offloaded)
        (path,) = tmp_path.glob("*.states.*")
        with path.open("r+b") as file:
            file.write(np.int64(77).tobytes())
        with pytest.raises(RuntimeError, match=r"generation 77 .* parameter 0, not 2"):
            offloaded.state_dict()
        with pytest.raises(RuntimeError, match="another program has changed the file"):
            offloaded.step()

    def test_an_optimizer_that_cannot_be_offloaded_keeps_its_states(self, tmp_path):
        params = make_params()
        inner = optim.AdamW(params)
        give_gradients(params, params, 0)
        inner.step()
        last = inner.state[params[-1]]
        before = inner.state_dict()
        last["exp_avg"], right = torch.ones(3), last["exp_avg"]
        with pytest.raises(ValueError, match="a state 'exp_avg' of parameter 7"):
            nvmeio.torch.offload(inner, tmp_path)
        last["exp_avg"] = right
        assert state_equal(inner.state_dict(), before)
        assert not list(tmp_path.glob("*.states.*"))
        with nvmeio.torch.offload(inner, tmp_path) as offloaded:
            assert not inner.state
            assert state_equal(offloaded.state_dict(), before)


class TestRefused:
    @pytest.mark.parametrize(
        "make",
        [
            optim.LBFGS,
            optim.Muon,
            optim.Adadelta,
            optim.SparseAdam,
            type("Own", (optim.AdamW,), {}),
        ],
        ids=lambda kind: kind.__name__,
    )
    def test_unsupported_kinds_of_optimizers_are_refused(self, make, tmp_path):
        inner = make([torch.nn.Parameter(torch.ones(3, 4))])
        with pytest.raises(TypeError, match=f"{make.__name__} cannot be offloaded"):
            nvmeio.torch.offload(inner, tmp_path)
        with pytest.raises(TypeError, match="optimizer is of type Linear"):
            nvmeio.torch.offload(torch.nn.Linear(1, 1), tmp_path)

    @pytest.mark.parametrize("option", ["differentiable", "capturable"])
    def test_unsupported_options_are_refused(self, option, tmp_path):
        inner = optim.AdamW(make_params(), **{option: True})
        with pytest.raises(ValueError, match=f"group 0 has {option}=True"):
            nvmeio.torch.offload(inner, tmp_path)
        with nvmeio.torch.offload(optim.AdamW(make_params()), tmp_path) as offloaded:
            offloaded.param_groups[0][option] = True
            with pytest.raises(ValueError, match=f"group 0 has {option}=True"):
                offloaded.step()

    def test_sparse_gradients_are_refused(self, tmp_path):
        module = torch.nn.Embedding(100, 8, sparse=True)
        with nvmeio.torch.offload(optim.SGD(module.parameters()), tmp_path) as offloaded:
            module(torch.tensor([3])).sum().backward()
            before = module.weight.detach().clone()
            with pytest.raises(RuntimeError, match=r"shape \(100, 8\) .* is sparse"):
                offloaded.step()
            assert torch.equal(before, module.weight)

    def test_a_parameter_that_appears_twice_is_refused(self, tmp_path):
        param = torch.nn.Parameter(torch.ones(3))
        with pytest.warns(UserWarning, match="duplicate"):
            inner = optim.AdamW([param, param])
        with pytest.raises(ValueError, match="appears twice"):
            nvmeio.torch.offload(inner, tmp_path)

    @pytest.mark.parametrize(
        ("memory", "error", "words"),
        [
            ("1XB", ValueError, "memory is '1XB'; it must be a number of bytes"),
            (1, ValueError, r"memory is 1; it must be 8388608 bytes \(8 MiB\) or more"),
            ("7MiB", ValueError, "or more"),
            (1.5, TypeError, "memory is 1.5"),
            (None, TypeError, "memory is None"),
            (True, TypeError, "memory is True"),
        ],
    )
    def test_invalid_sizes_are_refused(self, memory, error, words, tmp_path):
        with pytest.raises(error, match=words):
            nvmeio.torch.offload(optim.AdamW(make_params()), tmp_path, memory=memory)

    def test_a_folder_in_use_is_refused(self, tmp_path):
        with nvmeio.torch.offload(optim.AdamW(make_params()), tmp_path):
            with pytest.raises(BlockingIOError, match=f"process {os.getpid()}"):
                nvmeio.torch.offload(optim.AdamW(make_params()), tmp_path)
            found = run_child("offload_in", folder=str(tmp_path)).report
            assert found == ["BlockingIOError", True]
        nvmeio.torch.offload(optim.AdamW(make_params()), tmp_path).close()

    def test_a_folder_that_is_a_dangling_link_is_named(self, tmp_path):
        (tmp_path / "states").symlink_to("nowhere")
        with pytest.raises(NotADirectoryError, match="link to 'nowhere', which does not"):
            nvmeio.torch.offload(optim.AdamW(make_params()), tmp_path / "states")

    def test_an_offloaded_optimizer_cannot_be_offloaded_again(self, tmp_path):
        inner = optim.AdamW(make_params())
        with nvmeio.torch.offload(inner, tmp_path / "1"):
            with pytest.raises(ValueError, match=r"is offloaded to '.+1' already; use"):
                nvmeio.torch.offload(inner, tmp_path / "2")
            assert not (tmp_path / "2").exists()
        nvmeio.torch.offload(inner, tmp_path / "2").close()

    def test_an_offloaded_optimizer_cannot_be_copied(self, tmp_path):
        with nvmeio.torch.offload(optim.AdamW(make_params()), tmp_path) as offloaded:
            for copied in (copy.deepcopy, copy.copy, pickle.dumps):
                with pytest.raises(
                    TypeError, match=r"cannot be .*copied; .*its state_dict"
                ):
                    copied(offloaded)

    def test_parameters_that_wrap_tensors_are_refused(self, tmp_path):
        from torch.testing._internal.two_tensor import TwoTensor

        param = torch.nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3)))
        with pytest.raises(TypeError, match=r"parameter 1 \(group 0\) is a TwoTensor"):
            nvmeio.torch.offload(
                optim.AdamW([torch.nn.Parameter(torch.ones(3)), param]), tmp_path / "states"
            )
        assert not (tmp_path / "states").exists()

    def test_the_inner_optimizer_refuses_to_be_used(self, tmp_path):
        inner = optim.AdamW(make_params())
        with nvmeio.torch.offload(inner, tmp_path):
            for call in (
                inner.step,
                inner.state_dict,
                lambda: inner.load_state_dict({}),
                lambda: inner.add_param_group({}),
            ):
                with pytest.raises(
                    RuntimeError, match=r"the optimizer that offload\(\) returned"
                ):
                    call()


class TestTheEnd:
    def test_closing_leaves_nothing(self, tmp_path):
        for end in ("close", "collected"):
            offloaded = nvmeio.torch.offload(optim.AdamW(make_params()), tmp_path)
            assert list(tmp_path.glob("*.states.*"))
            if end == "close":
                offloaded.close()
                offloaded.close()
                with pytest.raises(ValueError, match="is closed"):
                    offloaded.step()
            del offloaded
            gc.collect()
            assert not list(tmp_path.glob("*.states.*"))

    @pytest.mark.parametrize("when", ["made", "closed"])
    def test_ctrl_c_while_offloading_leaves_nothing(self, when, tmp_path, monkeypatch):
        _, _, _, offloaded = pair(tmp_path)

        class Interrupted:
            closed, path = False, ""

            def __init__(self, path, *_):
                if when == "made":
                    # As if the signal came between the call and the assignment of its
                    # result.
                    Path(path).touch()
                    raise KeyboardInterrupt

            def fileno(self):
                raise KeyboardInterrupt

            close = fileno

        if when == "made":
            monkeypatch.setattr(store, "File", Interrupted)
            with pytest.raises(KeyboardInterrupt):
                offloaded.add_param_group({"params": make_params()})
            offloaded.close()
        else:
            offloaded._store._files.append(Interrupted(""))
            with pytest.raises(KeyboardInterrupt):
                offloaded.close()
        assert not list(tmp_path.glob("*.states.*"))

    def test_parameters_are_released_with_their_optimizer(self, tmp_path):
        _, _, ours, offloaded = pair(tmp_path)
        give_gradients(ours, ours, 0)
        offloaded.step()
        left, ours[0].grad = weakref.ref(ours[0]), None
        gc.disable()
        try:
            # First one that was removed from its group, then the others with the optimizer.
            del offloaded.param_groups[0]["params"][0], ours[0]
            offloaded.step()
            assert left() is None
            left = weakref.ref(ours.pop())
            del ours, offloaded
            assert left() is None
            assert not list(tmp_path.glob("*.states.*"))
        finally:
            gc.enable()

    def test_the_end_of_python_leaves_nothing(self, tmp_path):
        assert run_child("offload_in", folder=str(tmp_path)).report == ["ok", True]
        assert not list(tmp_path.glob("*.states.*"))

    @pytest.mark.skipif(
        not can_fork(), reason="sanitizers cannot follow forks of a process with threads"
    )
    def test_a_forked_child_cannot_use_the_optimizer(self, tmp_path):
        found = run_child("offload_and_fork", folder=str(tmp_path)).report
        assert "belongs to the parent process" in found["words"]
        assert found["files"] == 1
        assert found["equal"]
