"""The wire contract of Forebay."""
