"""What speaks gRPC: the port, its calls, messages and statuses, limits on uploads, and the call log."""
