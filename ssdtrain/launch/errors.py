"""The launcher's own error."""

from __future__ import annotations

from ssdtrain.errors import SSDTrainError

__all__ = ["RunError"]


class RunError(SSDTrainError):
    """A run went wrong and the text says all there is to say: no traceback is needed.

    Args:
        message: What happened and what to do.
        exit_code: With which the command ends.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
