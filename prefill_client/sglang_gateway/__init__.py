"""SGLang's encoder protocol in front, the encoder service behind: for an unmodified SGLang that installs nothing."""
