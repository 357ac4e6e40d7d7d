"""Train PyTorch models whose activations do not fit: they wait for backward on SSD."""

from ssdtrain.config import OffloadConfig
from ssdtrain.errors import (
    ActivationLostError,
    ConfigError,
    InplaceModificationError,
    SSDTrainError,
    StoreError,
)
from ssdtrain.offload import OffloadActivations
from ssdtrain.stats import OffloadStats

__all__ = [
    "ActivationLostError",
    "ConfigError",
    "InplaceModificationError",
    "OffloadActivations",
    "OffloadConfig",
    "OffloadStats",
    "SSDTrainError",
    "StoreError",
    "__version__",
]

__version__ = "0.1.0"
