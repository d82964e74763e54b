"""What several applications share."""
