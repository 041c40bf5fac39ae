"""What an operator sees: metrics, the HTTP port, logs, and `top`."""
