"""The GPT."""
