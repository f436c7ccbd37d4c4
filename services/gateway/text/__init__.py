"""What a gateway makes of text: the chat template's prompt, and the text of a stream of tokens."""
