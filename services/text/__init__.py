"""Text and tokens, as gateway and worker both see them: vocabularies and tokenizers from a model's files, and grammars over them.

Knows no service, no wire and no weights.
"""
