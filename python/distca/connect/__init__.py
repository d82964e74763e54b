"""Ranks of a group: processes, hosts and the ways between them."""
