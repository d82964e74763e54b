"""`distca doctor`: reports what was found on this machine."""
