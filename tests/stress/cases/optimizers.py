"""Take steps of offloaded optimizers under faults."""

import copy
from collections import Counter
from pathlib import Path

import pytest
import torch

import nvmeio.torch
from cases.seeded import each_case, may_fail
from workloads.common import report
from workloads.optimizers import FORMS, KINDS, equal, state_equal, supports

STEPS = 6
# With more, there are so many blocks that a step hardly ever succeeds.
ELEMENTS_MAX = 300_000


class Case:
    """An ordinary optimizer and an offloaded one, with equal parameters."""

    def __init__(self, draw, folder, counts):
        self.draw, self.folder, self.counts = draw, folder, counts
        kind, form = draw.choice(
            [(kind, form) for kind in KINDS for form in FORMS if supports(kind, form)]
        )
        if draw.random() < 0.5:
            kind = "AdamW"
        self.make = lambda params: KINDS[kind](params, **FORMS[form])
        # torch's fused SGD raises TypeError if only some parameters have a momentum.
        self.skips = (kind, form) != ("SGD", "fused")
        self.random = torch.Generator().manual_seed(draw.randrange(1 << 30))
        self.theirs = self.drawn_params(draw.randint(1, 5))
        self.ours = self.copies()
        self.ordinary = self.make(self.theirs)
        self.offloaded = None
        self.engine = ""

    def drawn_params(self, count):
        """Return parameters; few are large, some are empty."""
        size_max = [self.draw.choice((0, 50, 5000, ELEMENTS_MAX)) for _ in range(count)]
        return [
            torch.nn.Parameter(
                torch.randn(self.draw.randint(size // 2, size), generator=self.random)
            )
            for size in size_max
        ]

    def copies(self):
        """Return copies of the ordinary optimizer's parameters."""
        return [torch.nn.Parameter(param.detach().clone()) for param in self.theirs]

    def succeeds(self, what, call):
        """Return whether a call succeeds; count that, or a failure by an injected fault."""
        before = self.counts[what]
        with may_fail(what, self.folder, self.counts):
            call()
        assert self.offloaded is None or self.offloaded._store.handle.pending == 0
        return self.counts[what] > before

    def until_it_succeeds(self, what, call):
        """Repeat a call until it succeeds."""
        while not self.succeeds(what, call):
            pass

    def offload(self):
        """Offload an optimizer with the states of the ordinary one."""
        inner = self.make(self.ours)
        inner.load_state_dict(copy.deepcopy(self.ordinary.state_dict()))

        def offloading():
            before = copy.deepcopy(inner.state_dict())
            try:
                self.offloaded = nvmeio.torch.offload(inner, self.folder, memory="8MiB")
            except OSError:
                assert state_equal(inner.state_dict(), before)
                raise

        self.until_it_succeeds("offloaded", offloading)

    def step(self):
        """Take a step; it is right, or fails, and then states must be loaded."""
        for param, other in zip(self.theirs, self.ours, strict=True):
            grad = torch.randn(param.shape, generator=self.random)
            param.grad = None if self.skips and self.draw.random() < 0.2 else grad
            other.grad = None if param.grad is None else grad.clone()
        before = [param.detach().clone() for param in self.ours]
        self.ordinary.step()
        while not self.succeeds("steps", self.offloaded.step):
            if self.refuses():
                self.counts["steps refused"] += 1
                self.recover()
                break
            assert equal(before, self.ours)
        assert equal(self.theirs, self.ours)

    def refuses(self):
        """Return whether the optimizer refuses everything until states are loaded."""
        try:
            self.offloaded.state_items()
        except RuntimeError as error:
            return "half-way" in str(error)
        return False

    def recover(self):
        """Load parameters and states; nothing else works until that succeeds."""
        with torch.no_grad():
            for param, other in zip(self.theirs, self.ours, strict=True):
                other.copy_(param)
        saved = self.ordinary.state_dict()
        while not self.succeeds("states loaded", lambda: self.load(saved)):
            assert self.refuses()
            with pytest.raises(RuntimeError, match="half-way"):
                self.offloaded.step()

    def load(self, saved):
        """Load states in one of several ways."""
        if self.draw.random() < 0.5:
            self.offloaded.load_state_dict(saved)
            return
        states = saved["state"].items()
        pairs = [("param_groups", saved["param_groups"])]
        pairs += [(f"state/{i}/{name}", s[name]) for i, s in states for name in s]
        self.offloaded.load_state_dict(pairs)

    def compare(self):
        """Read all states; they are right, or an error reports that they were not read."""
        found = []
        how = self.draw.choice(("state_dict", "state_items"))
        if self.succeeds(
            how, lambda: found.append(self.read(getattr(self.offloaded, how)()))
        ):
            assert state_equal(found[0], self.read(self.ordinary.state_dict()))

    def read(self, states):
        """Return states by name, whatever their order."""
        if not isinstance(states, dict):
            return dict(sorted(dict(states).items(), key=lambda item: item[0]))
        pairs = {
            f"state/{index}/{name}": value
            for index, state in states["state"].items()
            for name, value in state.items()
        }
        return dict(sorted({"param_groups": states["param_groups"], **pairs}.items()))

    def change(self):
        """Add a group or change the layout; a failure must change nothing."""
        groups = self.offloaded.param_groups
        if self.draw.random() < 0.5 and "Adagrad" not in repr(self.ordinary):
            theirs = self.drawn_params(1)
            ours = [torch.nn.Parameter(param.detach().clone()) for param in theirs]
            count = len(groups)
            if self.succeeds(
                "groups", lambda: self.offloaded.add_param_group({"params": ours})
            ):
                self.ordinary.add_param_group({"params": theirs})
                self.theirs += theirs
                self.ours += ours
            else:
                assert len(groups) == count
        else:
            for params in (self.ordinary.param_groups[0], groups[0]):
                params["params"].reverse()
            self.theirs = [p for g in self.ordinary.param_groups for p in g["params"]]
            self.ours = [p for g in groups for p in g["params"]]

    def run(self):
        """Take steps, with other calls in between."""
        self.offload()
        with self.offloaded:
            for _ in range(STEPS):
                self.step()
                if self.draw.random() < 0.3:
                    self.change()
                    self.step()
                if self.draw.random() < 0.5:
                    self.compare()
            self.engine = self.offloaded._store.handle.engine
        assert not list(self.folder.glob("*.states"))


def optimizer_cases(first, count, folder):
    """Take steps with optimizers."""
    torch.set_num_threads(1)
    counts = Counter()
    for draw in each_case(first, count):
        case = Case(draw, Path(folder), counts)
        case.run()
    counts["engine is " + case.engine] += 1
    report(counts)
