"""Mutated headers of safetensors files: nvmeio reads them as safetensors does.

A file that the two read differently is kept in build/fuzz/found.  Once the difference is
mended, the file belongs in tests/fuzz/corpus/safetensors, which the test suite replays.
"""

import random

import pytest

from hostile_headers import difference, keep, mutant, read_by_nvmeio

# Headers in one case.
MUTANTS = 50_000


@pytest.mark.parametrize("part", range(2))
@pytest.mark.amount(short=0, full=10, long=200)
def test_safetensors_and_nvmeio_agree_on_every_header(seeds, part, record_property):
    taken = files = 0
    for seed in seeds:
        rng = random.Random(f"{seed} {part}")
        for _ in range(MUTANTS):
            content = mutant(rng)
            found = difference(content)
            assert found is None, f"{found}; the file is kept: {keep(content)}"
            taken += read_by_nvmeio(content)[0] is not None
            files += 1
    record_property("files", files)
    record_property("of which both take", taken)
