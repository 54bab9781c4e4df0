"""Loaders for training jobs: optional, on torch and pyarrow, which only this room imports. Nothing else imports it.

Above `cachefs.client`, for hints, and `policies`, for the order. Installing needs the extra `loaders`.
"""

try:
    from cachefs.loaders.parquet import ParquetDataset
    from cachefs.loaders.tensors import to_tensors
except ModuleNotFoundError as error:
    if error.name not in ("torch", "pyarrow"):
        raise
    raise ModuleNotFoundError(
        f"cachefs.loaders needs {error.name}: run pip install torch pyarrow", name=error.name
    ) from None

__all__ = ["ParquetDataset", "to_tensors"]
