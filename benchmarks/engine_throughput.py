"""Stores and loads blocks through the engine, and asks fio what the disk could have done.

    .venv/bin/python benchmarks/engine_throughput.py [--dir DIR] [--rounds N] [--total SIZE] [--json FILE]

Engine and fio take turns within each round, on the same directory, with the same block size, the same number of
bytes and as many fio jobs as the engine has threads. A ratio is formed within a round, and the median over the
rounds is reported: what else the disk and the machine do then weighs on both sides.

What makes the two comparable:

- Both go past the page cache (O_DIRECT; the engine refuses to start without it), one system call a block.
- The engine is driven by autograd through `OffloadActivations`, so that it is asked as training asks it.
- Both files were written once before the first measured round: a first write into preallocated blocks costs extra.
- The engine's tensors lie as torch's allocator puts them, 64 bytes into a page; fio's buffers are page-aligned.
- fio writes from and reads into one buffer a job again and again, which stays in the processor's caches; the engine
  writes each block from other memory, and reads into an arena of huge pages. A disk may want one request for every
  few scattered small pages: `--fio-huge-pages` lets fio have what the arena has.
- A run moves 1 GiB by default, so that beginning and end weigh little on either side.
- Writing ends when the last block is on disk. Reading begins with nothing in memory, in the order in which backward
  asks, and ends when the last block has been handed out.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import ssdtrain
from ssdtrain.config import parse_size

DIRECTIONS = ("write", "read")


class Sample(NamedTuple):
    """Bytes a second in one round."""

    engine: float
    fio: float


class Save(torch.autograd.Function):
    """Has a block saved in the forward pass, and asks for it in the backward pass. Computes nothing."""

    @staticmethod
    def forward(ctx: Any, carry: Tensor, block: Tensor, check: bool) -> Tensor:
        """Save the block."""
        ctx.save_for_backward(block)
        ctx.expected = block if check else None
        return carry.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Ask for the block, and let go of it at once."""
        (restored,) = ctx.saved_tensors
        if ctx.expected is not None and not torch.equal(restored, ctx.expected):
            sys.exit("engine_throughput: error: a block came back with other bytes")
        return gradient, None, None


class EngineSide:
    """The engine, driven by autograd as in training.

    Args:
        directory: Where the spill file lies.
        block_bytes: Size of each block.
        blocks: How many blocks are alive at one time.
        threads: I/O threads.
    """

    def __init__(self, directory: Path, block_bytes: int, blocks: int, threads: int) -> None:
        self._offload = ssdtrain.OffloadActivations(
            spill_dir=directory,
            backend="direct",
            io_threads=threads,
            min_tensor_bytes=block_bytes,
            # Every block has to get to the disk, as with fio.
            on_full_queue="wait",
        )
        # Random, because some disks are faster with zeros. fio's buffers are random too.
        self._tensors = [torch.empty(block_bytes, dtype=torch.uint8).random_() for _ in range(blocks)]
        self._total = block_bytes * blocks

    def write(self, *, check: bool = False) -> float:
        """Store every tensor; returns bytes a second."""
        before = self._offload.stats.bytes_written
        carry = torch.zeros(1, requires_grad=True)
        began = time.perf_counter()
        with self._offload:
            for tensor in self._tensors:
                carry = Save.apply(carry, tensor, check)  # type: ignore[no-untyped-call]
        self._offload.synchronize()
        seconds = time.perf_counter() - began
        assert self._offload.stats.bytes_written - before == self._total
        self._graph = carry
        return self._total / seconds

    def read(self) -> float:
        """Load what `write` stored, last block first, and let go of each at once; returns bytes a second."""
        before = self._offload.stats.bytes_read
        began = time.perf_counter()
        self._graph.backward()  # type: ignore[no-untyped-call]
        seconds = time.perf_counter() - began
        assert self._offload.stats.bytes_read - before == self._total
        return self._total / seconds

    def close(self) -> None:
        """Stop the threads and give the disk's room back."""
        self._offload.close()


def run_fio(
    file: Path, direction: str, block_bytes: int, total: int, jobs: int, *, huge_pages: bool = False
) -> float:
    """Write or read all of a file with as many jobs as given, each its own part; returns bytes a second."""
    environment = os.environ | ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if huge_pages else {})
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
        env=environment,
    )
    if done.returncode:
        sys.exit(f"engine_throughput: error: fio failed: {' '.join((done.stderr or done.stdout).split())}")
    # fio may print notes before its JSON.
    result = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][direction]
    return float(result["io_bytes"] / max(result["runtime"] / 1000, 0.001))


def measure(folder: Path, block_bytes: int, options: argparse.Namespace) -> dict[str, list[Sample]]:
    """Samples of both directions, for one block size."""
    jobs = options.threads
    blocks = max(options.total // block_bytes // jobs, 1) * jobs
    total = blocks * block_bytes
    file = folder / "fio"
    with file.open("wb") as handle:
        os.posix_fallocate(handle.fileno(), 0, total)
    fio = functools.partial(
        run_fio, file, block_bytes=block_bytes, total=total, jobs=jobs, huge_pages=options.fio_huge_pages
    )
    engine = EngineSide(folder, block_bytes, blocks, jobs)
    samples: dict[str, list[Sample]] = {direction: [] for direction in DIRECTIONS}
    try:
        # Not measured: writes both files for the first time, faults in the memory, and compares the bytes.
        fio("write")
        engine.write(check=True)
        engine.read()
        for number in range(options.rounds):
            for direction, run_engine in zip(DIRECTIONS, (engine.write, engine.read), strict=True):
                # Close together, and each first in turn.
                if number % 2:
                    engine_rate, fio_rate = run_engine(), fio(direction)
                else:
                    fio_rate, engine_rate = fio(direction), run_engine()
                samples[direction].append(Sample(engine_rate, fio_rate))
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
        "--dir",
        type=Path,
        default=ssdtrain.OffloadConfig().directories[0],
        help="directory on the SSD (%(default)s)",
    )
    parser.add_argument("--sizes", nargs="+", default=["1MiB", "4MiB", "16MiB"], help="block sizes")
    parser.add_argument("--total", default="1GiB", help="bytes of each measured run (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds (%(default)s)")
    parser.add_argument(
        "--threads", type=int, default=ssdtrain.OffloadConfig().io_threads, help="I/O threads (%(default)s)"
    )
    parser.add_argument(
        "--at-least", type=float, metavar="RATIO", help="exit with 1 if any ratio is below it"
    )
    parser.add_argument(
        "--fio-huge-pages",
        action="store_true",
        help="buffers of 2 MiB and more in huge pages for fio too (glibc 2.35)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to a JSON file")
    options = parser.parse_args(arguments)
    try:
        options.sizes = [parse_size(size, "--sizes") for size in options.sizes]
        options.total = parse_size(options.total, "--total")
    except ssdtrain.ConfigError as error:
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
    print(
        f"{options.threads} threads, {options.total} bytes a run, {options.rounds} rounds, load average {load:.2f}"
    )
    if options.json is not None:
        document = {
            "threads": options.threads,
            "total_bytes": options.total,
            "rounds": options.rounds,
            "fio_huge_pages": options.fio_huge_pages,
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
