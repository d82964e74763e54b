"""The command `distca simulate`."""
