"""Builds and runs the containers for real on a Debian machine without an image registry: `make compose-test`."""
