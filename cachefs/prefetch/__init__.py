"""Data that are fetched before they are read: one engine with three users, prefetcher, hints and warm-up.

Each finds files in its own way, and sends to `queue` what is not cached of them and has room (`engine`).
"""
