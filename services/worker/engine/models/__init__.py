"""Model definitions: one decoder that serves every architecture by flags."""
