"""The packages that `make deb` has built, in empty environments and in an empty system (`make test-deb`)."""
