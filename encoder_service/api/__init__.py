"""The gRPC side: the port, its calls, messages and statuses, limits on uploads, and the call log."""
