"""A library that turns token ids into token ids. Start reading at engine.py; imports torch, numpy and the standard library only."""
