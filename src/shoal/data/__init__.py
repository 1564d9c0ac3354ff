"""Training data: corpora, tokenizers, encoded files, sample order and shards."""
