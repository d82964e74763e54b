"""`distca doctor`: what was found on this machine."""
