"""The command line and its applications. They use the library; it knows nothing of them."""
