"""Speculative decoding: several tokens of a sequence from one step. Drafters guess, the target verifies, nothing it emits changes."""
