"""Images by URL: loaded once, from hosts that the operator allows, and from inside its network only if it says so."""
