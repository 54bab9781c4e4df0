"""A reference model of docs/SEMANTICS.md, and what is compared with it under Hypothesis.

`reference.py` is the model: what the source was at each moment, and which of that a mount may show now. `machine.py`
draws operations on the mount, and changes of the source behind its back, and compares every answer. It drives
`node.py`: the filesystem's objects under a kernel (`kernel.py`) and clocks (`clocks.py`) of our own, a thousand runs a
minute.

Two more models: `slots.py`, of the requests that are owed (docs/FASTPATH.md), explored state by state; `relay.py`
drives the relay in C through the same operations.
"""
