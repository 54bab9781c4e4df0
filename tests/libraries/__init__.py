"""Datasets as other libraries write and read them, on the source and through a mount."""
