"""What one daemon serves: a mount that it makes (fresh.py), or one that it takes over from another (takeover.py)."""
