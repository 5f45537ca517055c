"""What an engine would take and how fast it would be, before it is started."""
