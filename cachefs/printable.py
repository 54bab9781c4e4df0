"""File names in text for people. A name is bytes that anybody may have chosen: line ends would forge lines of output
and of the log, and control sequences would command the terminal (B8).

JSON needs none of this: `json.dumps` escapes both.
"""

import os
import unicodedata

_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories: control, format (such as those that turn the direction of text), surrogates, line ends."""


def one_line(text: str | bytes) -> str:
    """`text` on one line, without anything that a terminal obeys: such characters as \\x1b, \\u2028, bytes as \\xff."""
    if isinstance(text, bytes):
        text = os.fsdecode(text)
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(each) if unicodedata.category(each) in _UNSAFE else each for each in text)


def _escaped(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is no text (surrogateescape)
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
