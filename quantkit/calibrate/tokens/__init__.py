"""Conversion of texts and conversations to sequences of token ids."""
