"""Text and tokens: a model's tokenizer, its chat template, and the text of a stream of tokens."""
