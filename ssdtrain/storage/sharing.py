"""How the ranks of one machine share its SSDs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["directories_of_rank", "local_rank", "local_ranks"]


def local_ranks() -> int:
    """Ranks on this machine, by torchrun's `LOCAL_WORLD_SIZE`; 1 without it."""
    return max(_whole_number("LOCAL_WORLD_SIZE", 1), 1)


def local_rank() -> int:
    """This rank among them, by torchrun's `LOCAL_RANK`."""
    return _whole_number("LOCAL_RANK", 0) % local_ranks()


def directories_of_rank(directories: Sequence[Path]) -> tuple[Path, ...]:
    """This rank's directories of those that are given to all ranks of the machine.

    Each rank has its own where there are enough, so that none waits for the writes of another: with 4 directories
    and 2 ranks, rank 0 has the first and the third. Else ranks take turns over them, in the order of the list.
    """
    ranks, rank = local_ranks(), local_rank()
    if len(directories) >= ranks:
        return tuple(directories[rank::ranks])
    return (directories[rank % len(directories)],)


def _whole_number(variable: str, default: int) -> int:
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() else default
