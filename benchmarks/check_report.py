"""The rows that a check prints, and the time that its sections have."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["OUT_OF_TIME", "Report", "Row"]

OUT_OF_TIME = "not run: out of time"

# A section is to end by itself when the time is up; after so many seconds more it hangs.
GRACE_SECONDS = 20


@dataclass
class Row:
    """One thing that was looked at."""

    section: str
    name: str
    result: str = "ok"
    """"ok", "FAIL", or "not run" and why."""
    text: str = ""
    """What was found, for a person."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """The same for a program."""


class Report:
    """Rows, in the order in which they came, and the seconds that are left.

    Args:
        seconds: From now until no more is to be begun.
        clock: As `time.monotonic`.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rows: list[Row] = []
        self._clock = clock
        self._end = clock() + seconds
        self._section = ""

    @property
    def left(self) -> float:
        """Seconds until no more is to be begun."""
        return self._end - self._clock()

    @property
    def failed(self) -> bool:
        """Whether any row did."""
        return any(row.result == "FAIL" for row in self.rows)

    def add(self, name: str, result: str = "ok", text: str = "", **numbers: Any) -> Row:
        """One more row of the section that runs."""
        row = Row(self._section, name, result, text, numbers)
        self.rows.append(row)
        return row

    def section(self, name: str, needs: float, run: Callable[[], None]) -> None:
        """Run a section, if there is time for it.

        Args:
            name: For its rows.
            needs: Seconds below which it is not worth beginning.
            run: Adds rows. What it raises is a row that failed.
        """
        self._section = name
        if self.enough_time("", needs):
            with self.failures(""):
                run()

    def enough_time(self, name: str, needs: float) -> bool:
        """Whether so many seconds are left; if not, that is a row."""
        if self.left >= needs:
            return True
        self.add(name, OUT_OF_TIME)
        return False

    @contextmanager
    def failures(self, name: str) -> Iterator[None]:
        """Let what is raised inside be a row that failed, with its traceback on stderr."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told, and the rest goes on
            traceback.print_exc()
            reason = str(error).strip().partition("\n")[0]
            self.add(name, "FAIL", f"{type(error).__name__}: {reason}")

    @contextmanager
    def watched(self, end: Callable[[], None]) -> Iterator[None]:
        """End the process if what is inside hangs: with the stacks of all threads, and the table so far.

        Args:
            end: Prints and writes what there is.
        """

        def hangs() -> None:
            faulthandler.dump_traceback()
            self.add("", "FAIL", "hangs: the stacks of all threads are above")
            end()
            sys.stdout.flush()
            os._exit(1)

        timer = threading.Timer(self.left + GRACE_SECONDS, hangs)
        timer.daemon = True
        timer.start()
        # Needs no interpreter, for a thread that hangs with the GIL.
        faulthandler.dump_traceback_later(self.left + 2 * GRACE_SECONDS, exit=True)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            timer.cancel()

    def table(self) -> str:
        """All rows, in columns."""
        cells = [(row.section, row.name, row.result, row.text) for row in self.rows]
        widths = [max((len(row[column]) for row in cells), default=0) for column in range(3)]
        lines = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3]])
            for row in cells
        ]
        return "\n".join(line.rstrip() for line in lines)

    def write_json(self, path: Path) -> None:
        """All rows, with their numbers."""
        document = {"rows": [asdict(row) for row in self.rows], "failed": self.failed}
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
