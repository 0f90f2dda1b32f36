"""Texts and conversations to sequences of token ids."""
