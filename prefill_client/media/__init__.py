"""Images by URL: loaded once, from hosts that the operator allows; from the internal network only if a rule says so."""
