"""Run several ranks of torch.distributed, each in its own process."""

import os

from children import Child

__all__ = ["together"]


def together(tmp_path, name, size, **options):
    """Run a function of workloads on several ranks; return the report of each."""
    rendezvous = tmp_path / f"rendezvous-{name}-{size}-{len(os.listdir(tmp_path))}"
    ranks = [
        Child(name, rendezvous=str(rendezvous), rank=rank, size=size, **options)
        for rank in range(size)
    ]
    outcomes = [rank.finish() for rank in ranks]
    assert [each.status for each in outcomes] == [0] * size, outcomes
    return [each.report for each in outcomes]
