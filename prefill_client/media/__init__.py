"""Images by URL: fetched once, from where the operator allows, and never from inside the operator's own network."""
