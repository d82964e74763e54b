"""The command `distca profile`."""
