"""File names in text for people. Any user may choose the bytes of a name: line ends would forge lines of output and of
the log, and control sequences would control the terminal (B8).

JSON does not need this: `json.dumps` escapes both.
"""

import os
import unicodedata

_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories: control, format (for example, changes of the text direction), surrogates, line ends."""


def one_line(text: str | bytes) -> str:
    """`text` on one line, without control characters: these become \\x1b or \\u2028, and bytes become \\xff."""
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
