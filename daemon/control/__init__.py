"""The control socket and the metrics of a mount.

docs/CONTROL.md defines requests and answers.
"""
