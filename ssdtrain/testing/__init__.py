"""Stores for tests: slow, gated, failing, recording. The suite for new stores is `ssdtrain.testing.suite`.

This package imports no test framework; only `ssdtrain.testing.suite` needs pytest.
"""

from ssdtrain.testing.faults import Fault, FaultyStore
from ssdtrain.testing.stores import GatedStore, NullStore, Operation, RecordingStore, SlowStore
from ssdtrain.testing.wrapper import WrapperStore

__all__ = [
    "Fault",
    "FaultyStore",
    "GatedStore",
    "NullStore",
    "Operation",
    "RecordingStore",
    "SlowStore",
    "WrapperStore",
]
