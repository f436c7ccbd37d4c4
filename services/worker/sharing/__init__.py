"""One device, several models."""
