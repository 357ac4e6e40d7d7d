"""Stores and loads blocks through the engine, and asks fio what the disk could have done.

    .venv/bin/python benchmarks/engine_throughput.py [--dir DIR] [--rounds N] [--total SIZE] [--json FILE]

Engine and fio take turns within each round, on the same directory, with the same block size, the same number of
bytes and as many fio jobs as the engine has threads. A ratio is formed within a round, and the median over the
rounds is reported: what else the disk and the machine do then weighs on both sides.

What makes the two comparable:

- Both go past the page cache (O_DIRECT; the engine refuses to start without it), one system call a block.
- Both files were written once before the first measured round: a first write into preallocated blocks costs extra.
- The engine's tensors lie as torch's allocator puts them, 64 bytes into a page; fio's buffers are page-aligned.
- Writing ends when the last block is on disk. Reading begins with nothing in memory, in the order in which backward
  asks, and ends when the last block has been handed out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ssdtrain.block import Block, Handle
from ssdtrain.config import OffloadConfig, parse_size
from ssdtrain.device.cpu import CpuTransfer
from ssdtrain.engine import Engine
from ssdtrain.errors import ConfigError
from ssdtrain.memory.pool import BufferPool
from ssdtrain.saved import Geometry, Span
from ssdtrain.schedule import Pass, Schedule
from ssdtrain.storage import DirectStore

DIRECTIONS = ("write", "read")


class Sample(NamedTuple):
    """Bytes a second in one round."""

    engine: float
    fio: float


class EngineSide:
    """The engine as `ssdtrain/offload.py` sets it up, and the same calls in the same order.

    Args:
        directory: Where the spill file lies.
        block_bytes: Size of each block.
        blocks: How many blocks are alive at one time.
        threads: I/O threads.
    """

    def __init__(self, directory: str, block_bytes: int, blocks: int, threads: int) -> None:
        # A full queue waits: every block has to get to the disk, as with fio.
        config = OffloadConfig(io_threads=threads, on_full_queue="wait")
        assert isinstance(config.prefetch_bytes, int)
        self._engine = Engine(DirectStore(directory, direct=True), config)
        self._transfer = CpuTransfer(BufferPool(4 * config.prefetch_bytes))
        self._schedule = Schedule()
        # Random, because some disks are faster with zeros. fio's buffers are random too.
        self._tensors = [torch.empty(block_bytes, dtype=torch.uint8).random_() for _ in range(blocks)]

    def write(self) -> tuple[list[Handle], float]:
        """Store every tensor; returns handles and bytes a second."""
        handles: list[Handle] = []
        written: deque[Block] = deque()
        forward = Pass(self._schedule)
        began = time.perf_counter()
        for tensor in self._tensors:
            self._engine.settle(written)
            storage, geometry = tensor.untyped_storage(), Geometry.of(tensor)
            span = Span.of(storage, geometry)
            block = Block(
                storage, span, tensor._version, transfer=self._transfer, written=written, forward=forward
            )
            handle = self._engine.share(block, geometry, tensor.detach())
            assert handle is not None
            handles.append(handle)
            self._engine.store(block)
        self._engine.synchronize(written)
        return handles, self._bytes / (time.perf_counter() - began)

    def read(self, handles: list[Handle], *, check: bool = False) -> float:
        """Load every block, last stored first, and let go of it; returns bytes a second."""
        expected = list(self._tensors)
        began = time.perf_counter()
        while handles:
            handle = handles.pop()
            found = self._engine.fetch(handle, in_backward=True)
            assert isinstance(found, torch.UntypedStorage), "nothing of it may be in memory"
            self._transfer.deliver(found)
            restored = handle.geometry.view(found)
            assert not check or torch.equal(restored, expected.pop())
        return self._bytes / (time.perf_counter() - began)

    def close(self) -> None:
        """Stop the threads and give the disk's room back."""
        self._engine.close()

    @property
    def _bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)


def run_fio(file: Path, direction: str, block_bytes: int, total: int, jobs: int) -> float:
    """Write or read all of a file with as many jobs as given, each its own part; returns bytes a second."""
    done = subprocess.run(
        [
            "fio",
            "--name=spill",
            f"--filename={file}",
            f"--rw={direction}",
            f"--bs={block_bytes}",
            f"--size={total // jobs}",
            f"--offset_increment={total // jobs}",
            f"--numjobs={jobs}",
            "--thread",
            "--direct=1",
            "--ioengine=psync",
            "--group_reporting",
            "--output-format=json",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"engine_throughput: error: fio failed: {' '.join((done.stderr or done.stdout).split())}")
    # fio may print notes before its JSON.
    result = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][direction]
    return float(result["io_bytes"]) / (result["runtime"] / 1000)


def measure(folder: Path, block_bytes: int, options: argparse.Namespace) -> dict[str, list[Sample]]:
    """Samples of both directions, for one block size."""
    jobs = options.threads
    blocks = max(options.total // block_bytes // jobs, 1) * jobs
    total = blocks * block_bytes
    file = folder / "fio"
    with file.open("wb") as handle:
        os.posix_fallocate(handle.fileno(), 0, total)
    engine = EngineSide(os.fspath(folder), block_bytes, blocks, jobs)
    samples: dict[str, list[Sample]] = {direction: [] for direction in DIRECTIONS}
    try:
        # Not measured: writes both files for the first time, faults in the memory, and compares the bytes.
        run_fio(file, "write", block_bytes, total, jobs)
        engine.read(engine.write()[0], check=True)
        for number in range(options.rounds):
            # Back and forth, so that no side profits from coming second.
            fio = {}
            if number % 2:
                fio = {name: run_fio(file, name, block_bytes, total, jobs) for name in DIRECTIONS}
            handles, written = engine.write()
            read = engine.read(handles)
            fio = fio or {name: run_fio(file, name, block_bytes, total, jobs) for name in DIRECTIONS}
            samples["write"].append(Sample(written, fio["write"]))
            samples["read"].append(Sample(read, fio["read"]))
    finally:
        engine.close()
        file.unlink()
    return samples


def summarise(block_bytes: int, direction: str, samples: list[Sample]) -> dict[str, Any]:
    """One row of the table and of the JSON file."""
    ratios = [sample.engine / sample.fio for sample in samples]
    return {
        "block_bytes": block_bytes,
        "direction": direction,
        "engine_bytes_per_second": statistics.median(sample.engine for sample in samples),
        "fio_bytes_per_second": statistics.median(sample.fio for sample in samples),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def table_row(row: dict[str, Any]) -> str:
    """The row for people."""
    return (
        f"{row['block_bytes'] / 2**20:6g} MiB  {row['direction']:9}  "
        f"{row['engine_bytes_per_second'] / 1e9:11.2f}  {row['fio_bytes_per_second'] / 1e9:8.2f}  "
        f"{row['ratio']:5.2f}  {min(row['ratios']):5.2f} to {max(row['ratios']):.2f}"
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--dir", type=Path, default=OffloadConfig().directories[0], help="directory on the SSD (%(default)s)"
    )
    parser.add_argument("--sizes", nargs="+", default=["1MiB", "4MiB", "16MiB"], help="block sizes")
    parser.add_argument("--total", default="512MiB", help="bytes of each measured run (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds (%(default)s)")
    parser.add_argument("--threads", type=int, default=OffloadConfig().io_threads, help="I/O threads (%(default)s)")
    parser.add_argument("--at-least", type=float, metavar="RATIO", help="exit with 1 if any ratio is below it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to a JSON file")
    options = parser.parse_args(arguments)
    try:
        options.sizes = [parse_size(size, "--sizes") for size in options.sizes]
        options.total = parse_size(options.total, "--total")
    except ConfigError as error:
        parser.error(str(error))
    if options.rounds < 1 or options.threads < 1 or min(options.sizes) < 4096:
        parser.error("--rounds and --threads: expected at least 1; --sizes: expected at least 4096")
    if not options.dir.is_dir():
        parser.error(f"--dir: {options.dir} is not a directory; name one on an SSD")
    if shutil.which("fio") is None:
        parser.error("fio is not installed; on Debian and Ubuntu: apt install fio")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write JSON."""
    options = parse(arguments)
    rows = []
    print("     block  direction  engine GB/s  fio GB/s  ratio  over the rounds")
    with tempfile.TemporaryDirectory(prefix="ssdtrain-benchmark-", dir=options.dir) as folder:
        for block_bytes in options.sizes:
            for direction, samples in measure(Path(folder), block_bytes, options).items():
                rows.append(summarise(block_bytes, direction, samples))
                print(table_row(rows[-1]), flush=True)
    load = os.getloadavg()[0]
    print(f"{options.threads} threads, {options.total} bytes a run, {options.rounds} rounds, load average {load:.2f}")
    if options.json is not None:
        document = {
            "threads": options.threads,
            "total_bytes": options.total,
            "rounds": options.rounds,
            "load_average": load,
            "results": rows,
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if options.at_least is not None and any(row["ratio"] < options.at_least for row in rows):
        print(f"below {options.at_least:g} of fio: see the table", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
