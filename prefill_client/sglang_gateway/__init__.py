"""The gateway: serves SGLang's encoder protocol from the encoder service, for an SGLang without the plug-in."""
