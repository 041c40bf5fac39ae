"""Code that the plug-ins of all LLM engines share: settings, the check of the service's model, the client."""
