from __future__ import annotations

import pytest

from tests.distributed.ranks import run_ranks


@pytest.fixture
def ranks(tmp_path):
    """Runs a case in two or more ranks; returns what each rank returned."""

    def run(case, *arguments, ranks=2):
        return run_ranks(case, tmp_path, *arguments, ranks=ranks)

    return run
