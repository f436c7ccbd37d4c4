"""The OpenAI face: JSON in, JSON or server-sent events out. One file per endpoint; the work is done behind it."""
