"""How a case ends, other than well.

Station: raised by cases and by what they use; `runner` turns them into results.
"""

from __future__ import annotations

__all__ = ["CaseFailedError", "CaseSkippedError", "ExecutorGoneError", "NoExecutorError", "UnusableError"]


class CaseFailedError(Exception):
    """The executor breaks the contract.

    Args:
        contract: The sentence that it breaks, as "Message.field: sentence" with the words of the .proto file;
            empty where it is the one that the case is about.
        expected: What the sentence makes one expect here.
        got: What came.
    """

    def __init__(self, contract: str, expected: object, got: object) -> None:
        super().__init__(f"expected {expected}, got {got}")
        self.contract = contract
        self.expected = str(expected)
        self.got = str(got)


class ExecutorGoneError(Exception):
    """The executor does not answer any more."""


class CaseSkippedError(Exception):
    """The case does not apply to this executor; the message says why."""


class UnusableError(Exception):
    """No case can be run: there is no executor at the address, or one that the kit does not know how to ask."""


class NoExecutorError(UnusableError):
    """Nobody answers at the address."""
