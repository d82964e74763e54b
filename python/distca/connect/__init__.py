"""How ranks form a group: processes, hosts, and the ways between them."""
