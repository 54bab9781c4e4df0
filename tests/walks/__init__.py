"""The walks through the code in docs/ARCHITECTURE.md, compared with the functions that a mount really meets."""
