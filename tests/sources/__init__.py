"""The promises on each kind of filesystem that a source may lie on: docs/SOURCES.md has the table.

`kinds.py` makes the sources, `trees.py` what is on them and how another node changes it. `make test` runs the tests on
three kinds, `--all-sources` on all.
"""
