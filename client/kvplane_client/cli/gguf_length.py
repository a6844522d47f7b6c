"""How long a GGUF file has to be at least, from its head: what tells a download that was cut off.

Station: called by `model_check`. It steps over the settings and reads where each tensor begins; how long the last one
is depends on its type, of which there are many and new ones every year, so that one byte of it is asked for.

Source: the format is ggml's (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), versions 2 and 3.
"""

from __future__ import annotations

import os
from typing import BinaryIO

__all__ = ["least_length"]

_ALIGNMENT_KEY = b"general.alignment"
_DEFAULT_ALIGNMENT = 32
_UINT32, _STRING, _ARRAY = 4, 8, 9
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_MOST_DIMENSIONS = 8


def least_length(file: BinaryIO) -> int | None:
    """Reads the head.

    Args:
        file: At its beginning.

    Returns:
        Bytes that the file has at least if it is whole; None where this can not read its head: another version, or
        other types.

    Raises:
        EOFError: It ends within its head.
    """
    head = _Head(file)
    head.skip(4)
    version = head.integer(4)
    if version not in (2, 3):
        return None
    num_tensors, num_settings = head.integer(8), head.integer(8)
    alignment = _DEFAULT_ALIGNMENT
    for _ in range(num_settings):
        key, kind = head.text(), head.integer(4)
        if key == _ALIGNMENT_KEY and kind == _UINT32:
            alignment = head.integer(4)
        elif not head.skip_value(kind):
            return None
    last = None
    for _ in range(num_tensors):
        head.text()
        num_dimensions = head.integer(4)
        if num_dimensions > _MOST_DIMENSIONS:
            return None
        head.skip(8 * num_dimensions + 4)
        last = max(last or 0, head.integer(8))
    if last is None or alignment < 1:
        return head.position
    return -(-head.position // alignment) * alignment + last + 1


class _Head:
    """The head, read from its beginning.

    Args:
        file: The file.

    Attributes:
        position: Bytes read or stepped over.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self.position = 0

    def skip(self, count: int) -> None:
        """Steps over so many bytes. Raises EOFError: there are fewer."""
        self.position += count
        if self.position > self._size:
            raise EOFError(f"it ends after {self._size} bytes")
        self._file.seek(self.position)

    def integer(self, width: int) -> int:
        """Reads an unsigned number."""
        return int.from_bytes(self._read(width), "little")

    def text(self) -> bytes:
        """Reads a string."""
        return self._read(self.integer(8))

    def skip_value(self, kind: int) -> bool:
        """Steps over a setting's value; returns whether its type is known."""
        if kind == _STRING:
            self.skip(self.integer(8))
        elif kind in _SCALAR_BYTES:
            self.skip(_SCALAR_BYTES[kind])
        elif kind == _ARRAY:
            item, count = self.integer(4), self.integer(8)
            if item in _SCALAR_BYTES:
                self.skip(_SCALAR_BYTES[item] * count)
            elif item == _STRING:
                for _ in range(count):
                    self.skip(self.integer(8))
            else:
                return False
        else:
            return False
        return True

    def _read(self, count: int) -> bytes:
        begin = self.position
        self.skip(count)
        self._file.seek(begin)
        return self._file.read(count)
