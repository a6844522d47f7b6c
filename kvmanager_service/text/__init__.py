"""Text to token ids and back: tokenizer, chat template, detokenizer, stop strings. Knows no request and no wire."""
