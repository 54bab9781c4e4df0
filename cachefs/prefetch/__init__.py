"""Data that are fetched before they are read: one engine with three users, prefetcher, hints and warm-up.

Each finds files in its own way, and sends prefetch requests for what is not cached and fits (`engine`, `queue`).
"""
