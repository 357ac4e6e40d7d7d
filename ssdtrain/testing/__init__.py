"""Stores for tests (slow, overtaking, gated, failing, recording), and `OffloadOver`, which offloads into any of them.

`ssdtrain.testing.suite` has the tests that every store must pass, `ssdtrain.testing.engine_suite` those that every
offloader must pass, over whatever store. Only these two need pytest.
"""

from ssdtrain.testing.faults import Fault, FaultyStore, InjectedDeathError
from ssdtrain.testing.over import OffloadOver
from ssdtrain.testing.stores import (
    GatedStore,
    NullStore,
    Operation,
    RecordingStore,
    ReorderingStore,
    SlowStore,
)
from ssdtrain.testing.wrapper import WrapperStore

__all__ = [
    "Fault",
    "FaultyStore",
    "GatedStore",
    "InjectedDeathError",
    "NullStore",
    "OffloadOver",
    "Operation",
    "RecordingStore",
    "ReorderingStore",
    "SlowStore",
    "WrapperStore",
]
