"""Plans of batches: who computes what, which rows travel, and where they lie."""
