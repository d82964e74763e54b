"""`distca plan`: plans a batch without running it."""
