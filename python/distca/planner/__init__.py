"""Planning of batches: which server computes what, which rows travel, and where they lie."""
