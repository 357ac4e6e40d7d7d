"""Stores for tests (slow, overtaking, gated, failing, recording), and `OffloadOver`, which offloads into any of them.

`SimulatedDevice` is an accelerator whose streams are late on purpose, for machines without one.

`ssdtrain.testing.suite` has the tests that every store must pass, `ssdtrain.testing.device_suite` those of one that
moves device memory, and `ssdtrain.testing.engine_suite` those that every offloader must pass, over whatever store.
Only these three need pytest.
"""

from ssdtrain.testing.faults import Fault, FaultyStore, InjectedDeathError
from ssdtrain.testing.over import OffloadOver
from ssdtrain.testing.simulated import HostAccessStore, OrderError, SimulatedDevice, SimulatedTransfers
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
    "HostAccessStore",
    "InjectedDeathError",
    "NullStore",
    "OffloadOver",
    "Operation",
    "OrderError",
    "RecordingStore",
    "ReorderingStore",
    "SimulatedDevice",
    "SimulatedTransfers",
    "SlowStore",
    "WrapperStore",
]
