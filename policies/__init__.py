"""Pure decisions: no I/O, no clock, no logging, no async. The filesystem calls them."""
