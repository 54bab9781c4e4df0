"""Random damages of a cache directory: no wrong byte, no failed mount, no error for what the source has."""
