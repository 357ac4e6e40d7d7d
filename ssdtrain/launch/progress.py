"""What a person sees while a run goes on: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console
    from rich.progress import Progress as Bar

    from ssdtrain.launch.config import LaunchConfig
    from ssdtrain.launch.data import Corpus
    from ssdtrain.launch.train import StepRecord

__all__ = ["Progress", "format_bytes", "make_console"]

# Plain lines go into log files: a run of a million steps should not fill one.
SECONDS_BETWEEN_LINES = 1.0


def make_console(*, quiet: bool = False) -> Console:
    """Standard output; where it is no terminal, lines are as long as they need to be.

    Args:
        quiet: Say nothing.
    """
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True, quiet=quiet)
    if not console.is_terminal:
        console.width = 110
    return console


def format_bytes(count: float) -> str:
    """Decimal units, as disks are sold: 2.93 GB, 512.0 MB."""
    for unit, digits, size in (("GB", 2, 1e9), ("MB", 1, 1e6), ("kB", 1, 1e3)):
        if count >= size:
            return f"{count / size:.{digits}f} {unit}"
    return f"{count:.0f} B"


class Progress:
    """Reports one run.

    Args:
        config: That of the run.
        console: Where to.
        brief: Whether the data has been reported already.
    """

    def __init__(self, config: LaunchConfig, console: Console, *, brief: bool = False) -> None:
        self._config = config
        self._console = console
        self._brief = brief
        self._bar: Bar | None = None
        self._total = 0
        self._last_line = 0.0

    def corpus(self, corpus: Corpus) -> None:
        """Say what text is read."""
        if self._brief:
            return
        skipped = f", {corpus.skipped} skipped (not UTF-8 text)" if corpus.skipped else ""
        source = "from the cache" if corpus.from_cache else "new tokenizer"
        self._say(f"data: {len(corpus.tokens):,} tokens of {corpus.files} files{skipped} ({source})")

    def model(self, parameters: int) -> None:
        """Say what is trained."""
        model, train = self._config.model, self._config.train
        self._say(
            f"{self._config.mode}: {model.kind}, {model.layers} layers, {model.hidden_size} wide, "
            f"{parameters / 1e6:.1f} M parameters; {train.batch_size} x {model.sequence_length} tokens a step"
        )

    @contextlib.contextmanager
    def steps(self, total: int) -> Iterator[None]:
        """Show a bar for that many steps, where there is a terminal."""
        self._total = total
        if not self._console.is_terminal:
            yield
            return
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeRemainingColumn(),
        )
        with Bar(
            TextColumn(self._config.mode),
            *columns,
            console=self._console,
            transient=True,
            refresh_per_second=2,
        ) as self._bar:
            self._bar.add_task("", total=total, detail="")
            yield
        self._bar = None

    def step(self, number: int, record: StepRecord) -> None:
        """Report a step that has ended."""
        detail = f"loss {record.loss:.4f}  {record.seconds:.2f} s"
        if self._config.mode == "offload":
            detail += (
                f"  {format_bytes(record.bytes_on_disk)} on SSD  "
                f"written {format_bytes(record.bytes_written)}  read {format_bytes(record.bytes_read)}  "
                f"waited {record.stall_seconds:.2f} s"
            )
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=number, detail=detail)
        elif number in (1, self._total) or now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._say(f"{self._config.mode}: step {number}/{self._total}  {detail}")

    def _say(self, line: str) -> None:
        self._console.print(line)
        self._console.file.flush()
