"""Tools that need no mount: traces and graphs for the policies.

Used by the command line and the simulator.
"""
