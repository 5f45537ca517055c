"""The processes of a server, where they listen, and what a connection may do."""
