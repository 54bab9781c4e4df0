"""The program of the fast path, without a mount: the test is its kernel, its daemon and its Python."""
