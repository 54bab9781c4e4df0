"""The filesystem: source, index, blob, semantics. `daemon` runs it, `policies` decides for it."""

__version__ = "0.1.0"
