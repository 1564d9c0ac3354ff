"""Text in, token windows out: corpora, tokenizers, encoded files, order and shards."""
