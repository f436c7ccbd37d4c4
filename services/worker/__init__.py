"""Runs an engine on one device for the gateways that hold a lease."""
