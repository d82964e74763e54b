"""Code that several applications share."""
