"""The HTTP server: knows HTTP and JSON; knows no tensor."""
