"""The public face: authenticates, validates, tokenises, and streams answers back."""
