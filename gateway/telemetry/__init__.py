"""What operators see: metrics, the access log, the process's own log."""
