"""The control socket and the metrics of a mount.

docs/CONTROL.md has the requests and the answers.
"""
