"""The mount that a daemon serves: one that it makes (fresh.py), or takes over from another daemon (takeover.py)."""
