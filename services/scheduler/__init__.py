"""Decides where and when a request runs. The only owner of Redis."""
