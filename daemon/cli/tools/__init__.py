"""Commands that need no mount: traces, graphs, simulation.

They use `cachefs.tools` and `policies`.
"""
