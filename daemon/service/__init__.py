"""The process as a service: background, service manager, watchdog, descriptor store.

Without systemd all of it is silent.
"""
