"""One server at a time: its connection, its row streams, and rows in shared memory."""
