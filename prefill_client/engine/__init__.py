"""What the plug-ins of LLM engines share: settings, the check of the service's model, the client that they open."""
