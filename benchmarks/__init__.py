"""Benchmarks. Each measures ratios side by side in one run, never times against a fixed bound."""
