"""What ranks have of their own, and what becomes of one when another fails."""

from __future__ import annotations

import pytest

from tests.distributed import cases


def test_failure_of_one_rank_ends_the_others(ranks):
    with pytest.raises(AssertionError) as failure:
        ranks(cases.one_fails)
    assert "rank 1: " in str(failure.value)
    assert "ActivationLostError" in str(failure.value)
    assert "rank 0: " in str(failure.value), "it left its collective with an error, and did not hang"
    assert "Timeout" not in str(failure.value)


def test_killed_ranks_leave_nothing_and_the_next_ones_start_clean(ranks, tmp_path):
    spill = tmp_path / "spill"
    spill.mkdir()
    with pytest.raises(AssertionError, match="without a result"):
        ranks(cases.dies_in, spill)
    assert list(spill.iterdir()) == []
    (tmp_path / "meeting").unlink(missing_ok=True)
    for keep, offloaded, _ in ranks(cases.ddp, "buckets"):
        assert offloaded.losses == keep.losses


def test_storage_resized_while_it_is_written_stays_in_memory(ranks):
    for written, right in ranks(cases.resized_under_write):
        assert written == 0
        assert right
