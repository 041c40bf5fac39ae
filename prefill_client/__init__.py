"""What an LLM server imports: layout, plan, client. Never imports the server."""
