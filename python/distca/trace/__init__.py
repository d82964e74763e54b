"""What the ranks did when, and for how long."""
