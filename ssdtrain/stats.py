"""Counters that a person or an experiment tracker reads."""

from __future__ import annotations

from dataclasses import asdict, dataclass

__all__ = ["OffloadStats"]


@dataclass(frozen=True, kw_only=True)
class OffloadStats:
    """A snapshot. Counters are totals since construction, `live_*` are now. Sizes are bytes, times seconds."""

    tensors_packed: int = 0
    """Saved tensors that autograd handed over."""
    tensors_exempt: int = 0
    """Of these, never candidates: parameters, buffers, small tensors, anything not plain strided memory."""
    blocks_offloaded: int = 0
    """Blocks whose write ended."""
    blocks_deduplicated: int = 0
    """Saved tensors that joined a block already there."""
    blocks_forwarded: int = 0
    """Blocks that backward took from memory because their write had not ended."""
    blocks_kept: int = 0
    """Blocks never written because the store queue was full."""
    bytes_written: int = 0
    bytes_read: int = 0
    prefetch_hits: int = 0
    """Blocks whose read had begun before backward asked."""
    prefetch_misses: int = 0
    """Blocks that backward had to read itself."""
    stall_seconds: float = 0.0
    """Time that the compute thread waited for the disk or for room in the queue."""
    store_failures: int = 0
    live_blocks: int = 0
    """Blocks that some saved tensor still needs."""
    live_bytes_on_disk: int = 0
    """Without those in host memory before the disk. With backend "host", all of them."""
    backend: str = ""
    """The path really in use, e.g. "direct", "buffered", "host" or "host+direct"."""

    def as_dict(self, prefix: str = "") -> dict[str, int | float]:
        """The numbers alone, for a tracker; `prefix` goes before each name."""
        return {prefix + name: value for name, value in asdict(self).items() if not isinstance(value, str)}
