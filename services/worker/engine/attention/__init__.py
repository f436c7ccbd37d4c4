"""Attention over the paged cache: what a step attends to (metadata) and the reference way to compute it (paged)."""

from services.worker.engine.attention.metadata import AttentionMetadata

__all__ = ["AttentionMetadata"]
