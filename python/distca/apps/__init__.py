"""The command line and its applications. They use the library, which does not know them."""
